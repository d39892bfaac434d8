-- Change one entry in the table of API keys: the key belongs to a tenant, is revoked, or is forgotten.
--
-- KEYS: the table: hash of a key -> its entry ('': revoked); changed -> when the table last changed
-- ARGV: issue | revoke | forget, the hash, the entry, largest number of entries
-- Answers 'done', or 'full'.
local table_key, what, hash = KEYS[1], ARGV[1], ARGV[2]

if what == 'forget' then
  redis.call('HDEL', table_key, hash)
else
  if redis.call('HEXISTS', table_key, hash) == 0 and redis.call('HLEN', table_key) > tonumber(ARGV[4]) then
    return 'full'
  end
  redis.call('HSET', table_key, hash, what == 'issue' and ARGV[3] or '')
end
local time = redis.call('TIME')
redis.call('HSET', table_key, 'changed', time[1] .. '.' .. time[2])
return 'done'
