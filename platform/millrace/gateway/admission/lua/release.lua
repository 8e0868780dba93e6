-- KEYS: the buckets of each limit set, the slots. ARGV: the request ID, the number of limit sets, the limit sets as for
-- the admission. The costs are the amounts to release.
local num_sets = tonumber(ARGV[2])
for k = 1, num_sets do
    local stored = redis.call('GET', KEYS[k])
    if stored then
        local set, state = {struct.unpack(set_format, ARGV[3], (k - 1) * set_bytes + 1)}, state_of(stored)
        for w = 1, windows do
            local amount = set[2 * w + 1]
            if amount > 0 then
                local level = level_of(state, w, set[2 * w])
                state[2 * w - 1], state[2 * w] = max(0, level - amount * ticks_of[w]), now_of[w]
            end
        end
        redis.call('SET', KEYS[k], struct.pack(state_format, unpack(state)), 'KEEPTTL')
    end
end
for k = num_sets + 1, #KEYS do redis.call('ZREM', KEYS[k], ARGV[1]) end
