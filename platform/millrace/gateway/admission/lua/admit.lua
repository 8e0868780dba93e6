-- KEYS: the buckets of each limit set, the slots, the tenant's counters of the day. ARGV: the request ID, the lease in
-- milliseconds, the counters' TTL in seconds, the number of limit sets, the limit sets, the slots, the lengths, and the
-- names of all checks, each followed by a comma. A limit set is its group, and the limit (-1: none) and the cost for
-- each window. A slot is a group and a limit; a length is a group, a limit and a cost. Returns two numbers for each
-- check: the milliseconds until it would fit (0: it fits, -1: never), and the level or the number of slots after the
-- call. All numbers are packed as doubles.
local failed, results, has_failed = {}, {}, false
local function add_result(group, wait, level)
    results[#results + 1] = wait
    results[#results + 1] = level
    if wait ~= 0 then failed[group], has_failed = true, true end
end

local num_sets, sets, states = tonumber(ARGV[4]), {}, {}
local stored = num_sets > 0 and redis.call('MGET', unpack(KEYS, 1, num_sets)) or {}
for k = 1, num_sets do
    local set, state = {struct.unpack(set_format, ARGV[5], (k - 1) * set_bytes + 1)}, state_of(stored[k])
    sets[k], states[k] = set, state
    for w = 1, windows do
        local limit = set[2 * w]
        if limit >= 0 then
            local cost, level, wait = set[2 * w + 1], level_of(state, w, limit), 0
            local over = level + (cost - limit) * ticks_of[w]
            if cost > limit then wait = -1 elseif over > 0 then wait = math.ceil(over / limit) * tick_of[w] end
            add_result(set[1], wait, level)
        end
    end
end
local num_slots, held = #KEYS - 1 - num_sets, {}
for k = 1, num_slots do
    local group, limit = struct.unpack('<dd', ARGV[6], (k - 1) * 16 + 1)
    local key, wait = KEYS[num_sets + k], 0
    redis.call('ZREMRANGEBYSCORE', key, '-inf', now)
    local level = redis.call('ZCARD', key)
    held[k] = level >= limit and redis.call('ZSCORE', key, ARGV[1])
    if held[k] then level = level - 1 end
    if limit < 1 then wait = -1 elseif level >= limit then wait = 1000 end
    add_result(group, wait, level)
end
for first = 1, #ARGV[7], 24 do
    local group, limit, cost = struct.unpack('<ddd', ARGV[7], first)
    add_result(group, cost > limit and -1 or 0, 0)
end

local i, groups = 0, {}
for k = 1, num_sets do
    local set, state, group, has_changed, ttl = sets[k], states[k], sets[k][1], false, 0
    local is_taken = not failed[{{enforced}}] and not failed[group]
    for w = 1, windows do
        if set[2 * w] >= 0 then
            local cost = set[2 * w + 1]
            i = i + 1
            groups[i] = group
            if is_taken and cost > 0 then
                results[2 * i] = results[2 * i] + cost * ticks_of[w]
                state[2 * w - 1], state[2 * w], has_changed = results[2 * i], now_of[w], true
            end
        end
        if state[2 * w] > 0 then ttl = max(ttl, (ticks_of[w] + 1) * tick_of[w]) end
    end
    if has_changed then redis.call('SET', KEYS[k], struct.pack(state_format, unpack(state)), 'PX', ttl) end
end
for k = 1, num_slots do
    local key, group = KEYS[num_sets + k], struct.unpack('<d', ARGV[6], (k - 1) * 16 + 1)
    i = i + 1
    groups[i] = group
    if not failed[{{enforced}}] and not failed[group] then
        local added = redis.call('ZADD', key, now + ARGV[2], ARGV[1])
        if added == 1 or held[k] then results[2 * i] = results[2 * i] + 1 end
        if redis.call('PTTL', key) < tonumber(ARGV[2]) then redis.call('PEXPIRE', key, 2 * ARGV[2]) end
    end
end
if has_failed then
    for first = 1, #ARGV[7], 24 do
        i = i + 1
        groups[i] = struct.unpack('<d', ARGV[7], first)
    end
    i = 0
    for name in string.gmatch(ARGV[8], '([^,]+),') do
        i = i + 1
        if results[2 * i - 1] ~= 0 and (groups[i] == {{enforced}} or not failed[{{enforced}}]) then
            redis.call('HINCRBY', KEYS[#KEYS], (groups[i] == {{enforced}} and 'refused:' or 'dry:') .. name, 1)
            redis.call('EXPIRE', KEYS[#KEYS], ARGV[3])
        end
    end
end
return struct.pack('<' .. string.rep('d', #results), unpack(results))
