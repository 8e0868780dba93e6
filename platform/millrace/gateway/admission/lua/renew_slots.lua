-- KEYS: slots; ARGV: the lease in milliseconds, then the request ID in each slot.
local time = redis.call('TIME')
local ends = time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[1]
for i, key in ipairs(KEYS) do
    redis.call('ZADD', key, ends, ARGV[i + 1])
    redis.call('PEXPIRE', key, ARGV[1])
end
