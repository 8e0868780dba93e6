-- The buckets of a limit set are one string (see tenants.limits.token_buckets). Binary numbers take a tenth of the time
-- of msgpack or texts in these scripts, and a string takes less than the fields of a hash.
local windows = {{windows}}
local ticks_of = { {{ticks_of}} }
local tick_of = { {{tick_of}} }
local state_format = '<' .. string.rep('d', 2 * windows)
local set_format = '<' .. string.rep('d', 1 + 2 * windows)
local set_bytes = 8 * (1 + 2 * windows)
local function state_of(stored)
    local state = stored and {struct.unpack(state_format, stored)} or {}
    if not stored then for w = 1, 2 * windows do state[w] = 0 end end
    return state
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local now_of = {}  -- the current tick of each window
for w = 1, windows do now_of[w] = math.floor(now / tick_of[w]) end
local max, min = math.max, math.min
local function level_of(state, w, limit)
    local elapsed, ticks = max(0, now_of[w] - state[2 * w]), ticks_of[w]
    if elapsed >= ticks then return 0 end
    return max(0, min(state[2 * w - 1], limit * ticks) - elapsed * limit)
end
