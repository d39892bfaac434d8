-- The commands of Redis that exchange.lua uses, on a table in this process.
local SWEEP_MS = 60000

local kept, now_ms, swept_ms = {}, 0, 0 -- a value and its expiry by key, and the time

local function value_of(key)
  local entry = kept[key]
  return entry and entry.until_ms > now_ms and entry.value
end

local function put(key, value, ms)
  kept[key] = { value = value, until_ms = now_ms + ms }
end

local commands = {
  TIME = function() return { 0, now_ms * 1000 } end,
  GET = value_of,
  SET = function(key, value, _, ms) put(key, value, ms) end,
  DEL = function(key) kept[key] = nil end,
  PEXPIRE = function(key, ms) kept[key].until_ms = now_ms + ms end,
}

function commands.HSET(key, field, value)
  if not value_of(key) then
    put(key, {}, math.huge)
  end
  local fields = kept[key].value
  local added = fields[field] and 0 or 1
  fields[field] = value
  return added
end

function commands.HDEL(key, field)
  local fields = value_of(key) or {}
  fields[field] = nil
end

function commands.HMGET(key, ...)
  local fields, found = value_of(key) or {}, {}
  for i, field in ipairs({ ... }) do
    found[i] = fields[field]
  end
  return found
end

function commands.HGETALL(key)
  local found = {}
  for field, value in pairs(value_of(key) or {}) do
    found[#found + 1], found[#found + 2] = field, value
  end
  return found
end

local function copied(packed)
  local copy = {}
  for key, value in pairs(packed) do
    copy[key] = value
  end
  return copy
end

KEYS = { 'replicas', '' }
redis = {
  call = function(command, ...) return commands[command](...) end,
  error_reply = function(message) error(message, 0) end,
}
cjson = { null = python.none }
-- Values stay tables. The script changes a table that it has unpacked, but no table inside.
cmsgpack = { pack = function(value) return value end, unpack = copied }

-- Run the script with these arguments at this time.
return function(script, arguments, time_ms)
  ARGV, now_ms = arguments, time_ms
  if math.abs(now_ms - swept_ms) >= SWEEP_MS then
    swept_ms = now_ms
    for key in pairs(kept) do
      kept[key] = value_of(key) and kept[key] or nil
    end
  end
  return script()
end
