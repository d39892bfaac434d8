-- Change entries in the table of API keys, all of them or none: a key belongs to a tenant, is revoked, or is forgotten.
--
-- KEYS: the table: hash of a key -> its entry ('': revoked); changed -> when the table last changed
-- ARGV: largest number of entries; then for each change: note | forget, the hash, the entry
-- Answers 'done', or 'full'.
local table_key = KEYS[1]

local more = 0
for at = 2, #ARGV, 3 do
  local is_there = redis.call('HEXISTS', table_key, ARGV[at + 1])
  if ARGV[at] == 'forget' then
    more = more - is_there
  else
    more = more + 1 - is_there
  end
end
if more > 0 and redis.call('HLEN', table_key) - redis.call('HEXISTS', table_key, 'changed') + more > tonumber(ARGV[1]) then
  return 'full'
end
for at = 2, #ARGV, 3 do
  if ARGV[at] == 'forget' then
    redis.call('HDEL', table_key, ARGV[at + 1])
  else
    redis.call('HSET', table_key, ARGV[at + 1], ARGV[at + 2])
  end
end
local time = redis.call('TIME')
redis.call('HSET', table_key, 'changed', time[1] .. '.' .. time[2])
return 'done'
