-- KEYS: counters. ARGV: now, then free, first, longest and forget of each; all times in milliseconds.
-- Returns the longest wait. If it is 0, the attempt was counted, and the times until which counters are closed follow.
local now, wait, counts = tonumber(ARGV[1]), 0, {}
for i, key in ipairs(KEYS) do
    local stored = redis.call('HMGET', key, 'count', 'closed', 'at')
    if stored[1] and tonumber(stored[3]) + tonumber(ARGV[4 * i + 1]) > now then
        counts[i] = tonumber(stored[1])
        wait = math.max(wait, tonumber(stored[2]) - now)
    else
        counts[i] = 0
    end
end
if wait > 0 then return {wait} end
local answer = {0}
for i, key in ipairs(KEYS) do
    local free, first, longest, forget = unpack(ARGV, 4 * i - 2, 4 * i + 1)
    local count, closed = counts[i] + 1, 0
    if count >= tonumber(free) then
        closed = now + math.min(tonumber(longest), tonumber(first) * 2 ^ math.min(count - tonumber(free), 30))
    end
    redis.call('HSET', key, 'count', count, 'closed', string.format('%.0f', closed), 'at', string.format('%.0f', now))
    redis.call('PEXPIRE', key, forget)
    answer[i + 1] = closed
end
return answer
