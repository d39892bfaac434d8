-- Change entries in the table of API keys, all of them or none: a key belongs to a tenant, is revoked, or is forgotten.
--
-- KEYS: the table: hash of a key -> its entry ('': revoked); changed -> a mark that differs after every change
-- ARGV: largest number of fields; then for each change: note | forget, the field, its value
-- Answers 'done', or 'full'.
local table_key = KEYS[1]

local more = 0
for at = 2, #ARGV, 3 do
  more = more + (ARGV[at] == 'note' and 1 or 0) - redis.call('HEXISTS', table_key, ARGV[at + 1])
end
if more > 0 and redis.call('HLEN', table_key) + more > tonumber(ARGV[1]) then
  return 'full'
end
for at = 2, #ARGV, 3 do
  if ARGV[at] == 'forget' then
    redis.call('HDEL', table_key, ARGV[at + 1])
  else
    redis.call('HSET', table_key, ARGV[at + 1], ARGV[at + 2])
  end
end
return 'done'
