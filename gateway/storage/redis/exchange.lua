-- One sync round: a gateway reports what it uses and charged, and the reply has what the others did.
-- policies/replicas/messages.py names the values, and docs/replicas.md gives the reasons. Redis runs this script for
-- replicas on many machines, and the hub (gateway/storage/hub/script_store.py) for the workers of one gateway.
--
-- KEYS[1]  the gateways: a hash from a gateway's name to what it reported last
-- KEYS[2]  prefix of the names of counters and tallies, with the hash tag of the pool
-- ARGV[1]  name of the reporting gateway
-- ARGV[2]  number of the round
-- ARGV[3]  `ReplicaReport`, as MessagePack
--
-- A round may come twice, because its reply was lost. It is answered again, but counted once. A report with a value that
-- cannot be counted is answered with the error UNSOUND, and nothing of it is stored.

local MEMBER_MS = 3000      -- a gateway silent for this long has no part of any engine
local WAITS_MS = 300        -- a gateway silent for this long has no request that waits
local NUMBERS_MS = 3600000  -- its last number is kept longer, because it may only have been paused
local COUNTERS_MS = 900000  -- a tenant's or flow's counter is forgotten after this idle time
local BUCKETS_MAX = 64      -- buckets of one count that are kept

local me, number = ARGV[1], tonumber(ARGV[2])
local report = cmsgpack.unpack(ARGV[3])

-- Validation ---------------------------------------------------------------------------------------------------------

local NUMBER_MAX, SECONDS_MAX = 1e18, 1e12
-- The parts of a report in order, with a letter for each value of a row. n: a finite number; c: a count, from 0;
-- s: seconds, more than 0; b: four numbers; -: not checked.
local SHAPES = {
  { 'standings', '--nnn--' }, { 'holdings', '-cccccccc' }, { 'charges', '-nn--' },
  { 'tallies', '-csbbn-' }, { 'calls', '-nnns-' }, { 'usage', '-nc' }, { 'lefts', '--nn' },
}

local function is_sound(kind, value)
  if kind == '-' then
    return true
  elseif kind == 'b' then
    return type(value) == 'table' and is_sound('n', value[1]) and is_sound('n', value[2]) and
      is_sound('n', value[3]) and is_sound('n', value[4])
  elseif type(value) ~= 'number' or not (value >= -NUMBER_MAX and value <= NUMBER_MAX) then
    return false
  end
  return kind == 'n' or kind == 'c' and value >= 0 or kind == 's' and value > 0 and value <= SECONDS_MAX
end

local function unsound_place()
  if not is_sound('c', number) then
    return 'number'
  end
  for at, shape in ipairs(SHAPES) do
    local name, kinds = unpack(shape)
    local rows = report[at]
    for i = 1, type(rows) == 'table' and #rows or 0 do
      for place = 1, #kinds do
        if not is_sound(string.sub(kinds, place, place), rows[i][place]) then
          return name .. '[' .. i - 1 .. '][' .. place - 1 .. ']'
        end
      end
    end
  end
  return not is_sound('c', report[8]) and 'quantum' or nil
end

local unsound = unsound_place()
if unsound then
  return redis.error_reply('UNSOUND ' .. unsound .. ' of what this gateway reported is no number that can be counted here')
end

local standings, holdings, charges, tallies, calls, usage, lefts, quantum = unpack(report)
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

-- Members -------------------------------------------------------------------------------------------------------------

local function read(packed)
  local ok, record = pcall(cmsgpack.unpack, packed)
  if ok and type(record) == 'table' and record.number and record.seen_ms and record.holdings and
    record.standings then
    return record
  end
end

local others, before = {}, nil
local fields = redis.call('HGETALL', KEYS[1])
for i = 1, #fields, 2 do
  local record = read(fields[i + 1])
  -- After a failover of the server, its clock may be behind that of its predecessor.
  local age_ms = record and math.abs(now_ms - record.seen_ms)
  if fields[i] == me then
    before = record
  elseif not record or age_ms > NUMBERS_MS then
    redis.call('HDEL', KEYS[1], fields[i])
  elseif age_ms <= MEMBER_MS then
    record.is_silent = age_ms > WAITS_MS
    if record.is_silent then
      record.standings = {}
    end
    record.name = fields[i]
    local first = record.standings[1]
    -- Its request has waited since the report.
    record.standing = first and
      { first[1], first[2], first[3], first[4], first[5] + age_ms / 1000, first[6], first[7] }
    others[#others + 1] = record
  end
end
table.sort(others, function(one, other) return one.name < other.name end)
local is_repeated = before ~= nil and number <= before.number
local live = #others + 1

-- A standing: tenant, flow, service of each, wait of the next request, and whether that request is inside an interaction.
local BATCH = ' (batch)'
local function line_name(tenant)
  return string.sub(tenant, -#BATCH) == BATCH and BATCH or ''
end

-- Class batch that is owed service goes first, then interactive work, then other batch.
local function line_number(one)
  return one[7] and 0 or line_name(one[1]) == BATCH and 2 or 1
end

local function goes_first(one, other)
  if one[2] == other[2] then
    if one[6] ~= other[6] then
      return one[6]
    end
    return one[5] > other[5]
  end
  local line, other_line = line_number(one), line_number(other)
  if line ~= other_line then
    return line < other_line
  end
  if one[1] == other[1] and one[4] ~= other[4] then
    return one[4] < other[4]
  end
  return one[3] < other[3]
end

local function with_served(one, tenant, flow)
  return { one[1], one[2], one[3] + tenant, one[4] + flow, one[5], one[6], one[7] }
end

-- Charges -------------------------------------------------------------------------------------------------------------

-- An unsound value, which an earlier version of this script may have stored, counts as unknown.
local function number_in(key)
  local found = tonumber(redis.call('GET', key) or '')
  return is_sound('n', found) and found or nil
end

-- The counters of a waiting request as they were reported, plus what any gateway has charged to them since. Without the
-- later charges, every gateway that serves this flow would compare itself with outdated, too small counters.
local function as_of_now(waiting, counters)
  if not waiting or waiting[2] == '' then
    return waiting
  end
  local tenant = number_in(KEYS[2] .. 'c:' .. waiting[1]) or counters[1]
  local flow = number_in(KEYS[2] .. 'c:' .. waiting[2]) or counters[2]
  return with_served(waiting, tenant - counters[1], flow - counters[2])
end

-- The stored list of this length; false if it is another value, or none.
local function unpacked(packed, length)
  local ok, values = pcall(cmsgpack.unpack, packed or '')
  return ok and type(values) == 'table' and #values == length and values
end

-- The member that left last, among tenants ('') or among the flows of one tenant.
local function left_last(among)
  return unpacked(redis.call('GET', KEYS[2] .. 'l:' .. among), 4)
end

-- Return the floor of a member that arrives while no other of its kind waits at its own gateway: the least counter that
-- waits elsewhere or, where nothing waits, the counter of the member that left last. A member that waits elsewhere itself,
-- or left last itself, is not lifted.
local function floor_of(name, waiting)
  local tenant = string.match(name, '^(.-)\31')
  local among = tenant or line_name(name)
  local floor = nil
  for _, one in ipairs(waiting) do
    if one[tenant and 2 or 1] == name then
      return nil
    end
    if (tenant and one[1] or line_name(one[1])) == among then
      local served = one[tenant and 4 or 3]
      if not floor or served < floor then
        floor = served
      end
    end
  end
  if not floor then
    local left = left_last(among)
    if not left or left[2] == name then
      return nil
    end
    floor = number_in(KEYS[2] .. 'c:' .. left[2]) or left[3]
  end
  return quantum > 0 and floor - floor % quantum or floor
end

local floors, waiting_now = {}, nil
for i, charge in ipairs(charges) do
  if charge[5] then
    if not waiting_now then
      waiting_now = {}
      for _, other in ipairs(others) do
        for place, one in ipairs(other.standings) do
          local is_first = place == 1 and other.counters
          waiting_now[#waiting_now + 1] = is_first and as_of_now(one, other.counters) or one
        end
      end
    end
    floors[i] = floor_of(charge[1], waiting_now)
  end
end

-- A counter that is not known here has expired or was lost. It continues from the value that its gateway knows.
local totals = {}
for i, charge in ipairs(charges) do
  local name, base, service, raises = unpack(charge)
  local key = KEYS[2] .. 'c:' .. name
  local known = number_in(key)
  local total = known or base
  if not is_repeated then
    -- This server may have known the counter before it lost its data. The highest value that a gateway knows is right.
    local least = (raises or not before) and base or total
    total = math.max(total, least, floors[i] or total) + service
  end
  if total ~= known then
    redis.call('SET', key, string.format('%.17g', total), 'PX', COUNTERS_MS)
  end
  totals[i] = total
end

for _, left in ipairs(lefts) do
  local known = left_last(left[1])
  if not known or left[4] > known[4] then
    redis.call('SET', KEYS[2] .. 'l:' .. left[1], cmsgpack.pack(left), 'PX', COUNTERS_MS)
  end
end

-- Tallies ------------------------------------------------------------------------------------------------------------

-- Each tally is a hash from the number of a bucket to its counts.
local sums = {}
for i, tally in ipairs(tallies) do
  local name, bucket, ttl_s, more, base, since, is_lost = unpack(tally)
  local key = KEYS[2] .. 'w:' .. name
  local fields = {}
  local first = math.min(bucket, math.max(math.floor(since), bucket - BUCKETS_MAX + 1))
  for later = 0, bucket - first do -- a number above 2^53 plus 1 is the number itself, so that it would never end a loop
    fields[#fields + 1] = string.format('%.0f', first + later)
  end
  local found = redis.call('HMGET', key, unpack(fields))
  local reply = {}
  for at = 1, #fields - 1 do
    reply[at] = unpacked(found[at], 4) or { 0, 0, 0, 0 }
  end
  local sum = unpacked(found[#fields], 4) or base
  if not before or is_lost then
    for at = 1, 4 do
      sum[at] = math.max(sum[at], base[at])
    end
  end
  if not is_repeated and (is_lost or more[1] ~= 0 or more[2] ~= 0 or more[3] ~= 0 or more[4] ~= 0) then
    for at = 1, 4 do
      sum[at] = sum[at] + more[at]
    end
    if redis.call('HSET', key, fields[#fields], cmsgpack.pack(sum)) > 0 then
      local all = redis.call('HGETALL', key)
      for at = 1, #all, 2 do
        if tonumber(all[at]) <= bucket - BUCKETS_MAX then
          redis.call('HDEL', key, all[at])
        end
      end
    end
    redis.call('PEXPIRE', key, ttl_s * 1000)
  end
  reply[#fields] = sum
  sums[i] = reply
end

-- Open interactions ----------------------------------------------------------------------------------------------------

local opened = {}
for i, call in ipairs(calls) do
  local name, count, tokens, age_s, idle_s, is_over = unpack(call)
  local key = KEYS[2] .. 'i:' .. name
  local known = unpacked(redis.call('GET', key), 3) or { 0, 0, 0 }
  opened[i] = cjson.null
  if is_over then
    redis.call('DEL', key)
  elseif known[3] ~= 0 or count ~= 0 or tokens ~= 0 then
    if known[3] == 0 then
      known = { 0, 0, math.floor(now_ms - age_s * 1000) }
    end
    if not is_repeated then
      known = { known[1] + count, known[2] + tokens, known[3] }
    end
    redis.call('SET', key, cmsgpack.pack(known), 'PX', math.ceil(idle_s * 1000))
    opened[i] = { known[1], known[2], (now_ms - known[3]) / 1000 }
  end
end

-- Grants --------------------------------------------------------------------------------------------------------------

-- Return this gateway's grant of free capacity: the need of its next request, or its equal part if that is larger and its
-- requests can use it. Requests that go before it at other gateways keep what they need. Where nothing waits at any
-- gateway, each gateway gets its equal part in advance.
local function part(most, granted_elsewhere, held, wanted_before, wanted_elsewhere, needed, waiting)
  local free = most - granted_elsewhere - held
  if waiting > 0 then
    free = free - wanted_before
    return math.max(0, math.min(free, math.max(needed, math.min(needed * waiting, math.ceil(free / live)))))
  end
  if wanted_elsewhere then
    return 0
  end
  return math.max(0, math.floor(free / live))
end

local counters, at = false, {}
for i, charge in ipairs(charges) do
  at[charge[1]] = { reported = charge[2] + charge[3], total = totals[i] }
end
for place, one in ipairs(standings) do
  local tenant, flow = at[one[1]], at[one[2]]
  if one[2] ~= '' and tenant and flow then
    standings[place] = with_served(one, tenant.total - tenant.reported, flow.total - flow.reported)
    if place == 1 then
      counters = { tenant.total, flow.total }
    end
  end
end
local standing = standings[1]
for _, other in ipairs(others) do
  other.standing = other.counters and as_of_now(other.standing, other.counters) or other.standing
end

local grants, next_elsewhere, waiting_elsewhere = {}, false, {}
for _, other in ipairs(others) do
  other.by_name = {}
  for _, waiting in ipairs(other.standings) do
    waiting_elsewhere[#waiting_elsewhere + 1] = waiting
  end
  for _, holding in ipairs(other.holdings) do
    other.by_name[holding.backend] = holding
    if other.standing and holding.waiting > 0 and (not next_elsewhere or goes_first(other.standing, next_elsewhere)) then
      next_elsewhere = other.standing
    end
  end
end
local mine = {}
for i, holding in ipairs(holdings) do
  local backend, sequences, kv, kv_now, sequences_max, kv_max, waiting, next_sequences, next_kv = unpack(holding)
  local own = {
    backend = backend, sequences = sequences, kv_now = kv_now, sequences_max = sequences_max, kv_max = kv_max,
    waiting = waiting, next_sequences = next_sequences, next_kv = next_kv,
  }
  local granted, granted_kv, elsewhere, kv_elsewhere, sharers = 0, 0, 0, 0, 1
  local wanted, wanted_kv, is_wanted, first = 0, 0, false, {}
  for _, other in ipairs(others) do
    local held = other.by_name[backend]
    if held then
      -- A gateway that has used the engine for longer may have seen it run more sequences.
      sequences_max, kv_max = math.max(sequences_max, held.sequences_max), math.max(kv_max, held.kv_max)
      granted, granted_kv = granted + held.granted, granted_kv + held.granted_kv
      local waits = other.standing and held.waiting > 0
      if not other.is_silent then
        -- The engine's own gauges show a silent gateway's running requests better.
        elsewhere, kv_elsewhere = elsewhere + held.sequences, kv_elsewhere + held.kv_now
        if held.sequences > 0 or waits then
          sharers = sharers + 1
        end
      end
      if waits then
        is_wanted = true
        if not standing or goes_first(other.standing, standing) then
          first[#first + 1] = held
        end
      end
    end
  end
  -- Only requests that find a free slot can start, so only those need KV now. Otherwise the requests that wait for
  -- slots would keep all of the KV cache free.
  for _, held in ipairs(first) do
    local startable = math.ceil((sequences_max - granted - sequences - wanted) / math.max(1, held.next_sequences))
    local starts = math.max(1, math.min(held.waiting, startable))
    wanted, wanted_kv = wanted + starts * held.next_sequences, wanted_kv + starts * held.next_kv
  end
  own.granted = sequences + part(sequences_max, granted, sequences, wanted, is_wanted, next_sequences, waiting)
  own.granted_kv = kv + part(kv_max, granted_kv, kv, wanted_kv, is_wanted, next_kv, waiting)
  mine[i] = own
  grants[i] = { own.granted, own.granted_kv, elsewhere, kv_elsewhere, sharers }
end

local left = left_last('')
if left then
  left[3] = number_in(KEYS[2] .. 'c:' .. left[2]) or left[3]
end

local elsewhere = {}
for _, other in ipairs(others) do
  for _, row in ipairs(other.usage or {}) do
    local node, resource, amount = unpack(row)
    local key = resource .. ' ' .. node
    elsewhere[key] = { node, resource, (elsewhere[key] and elsewhere[key][3] or 0) + amount }
  end
end
local usage_elsewhere = {}
for _, row in pairs(elsewhere) do
  usage_elsewhere[#usage_elsewhere + 1] = row
end
local record = {
  number = math.max(number, before and before.number or 0), seen_ms = now_ms, standings = standings,
  counters = counters, usage = usage, holdings = mine,
}
redis.call('HSET', KEYS[1], me, cmsgpack.pack(record))
redis.call('PEXPIRE', KEYS[1], NUMBERS_MS)

return cmsgpack.pack({
  live, next_elsewhere or cjson.null, waiting_elsewhere, grants, totals, sums, opened, usage_elsewhere,
  left or cjson.null, before == nil and number > 1,
})
