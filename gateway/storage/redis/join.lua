-- Admit this gateway to a pool under these keys. The membership expires, so the gateway calls this script repeatedly.
--
-- KEYS: fairgate:{POOL}:layout    version of the layout of the pool's keys; never expires
--       fairgate:{POOL}:members   gateway -> {expires_ms, policy, backends}
-- ARGV: layout, name of the gateway, ttl_ms, policy, backend urls...
-- Answers {'joined', number of others}, {'layout', theirs}, {'policy', theirs}, or {'backends', theirs}. Their
-- backends are separated by spaces.
local layout_key, members_key = KEYS[1], KEYS[2]
local layout, replica, ttl_ms, policy = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]

local held = redis.call('GET', layout_key)
if held and held ~= layout then
  return {'layout', held}
end

local mine, backends = {}, {}
for i = 5, #ARGV do
  mine[ARGV[i]], backends[i - 4] = true, ARGV[i]
end

local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local others, shares, theirs = 0, false, ''

-- Return a member's policy, its backends, and whether it has one of ours; nothing if it has expired. Fail if it is alien.
local function read(member)
  local known = cjson.decode(member)
  local shared = false
  for _, url in ipairs(known.backends) do
    shared = shared or mine[url] == true
  end
  if known.expires_ms > now_ms then
    return known.policy .. '', table.concat(known.backends, ' '), shared
  end
end

local members = redis.call('HGETALL', members_key)
for i = 1, #members, 2 do
  local ok, other_policy, urls, shared = pcall(read, members[i + 1])
  if not (ok and other_policy) then
    redis.call('HDEL', members_key, members[i])
  elseif members[i] ~= replica then
    if other_policy ~= policy then
      return {'policy', other_policy}
    end
    others, theirs, shares = others + 1, urls, shares or shared
  end
end
if others > 0 and not shares then
  return {'backends', theirs}
end

redis.call('SET', layout_key, layout, 'NX')
local member = cjson.encode({expires_ms = now_ms + ttl_ms, policy = policy, backends = backends})
redis.call('HSET', members_key, replica, member)
redis.call('PEXPIRE', members_key, ttl_ms)
return {'joined', others}
