-- KEYS exits, replicas, beat; ARGV replica id, retention in seconds.
local now = tonumber(redis.call('TIME')[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[2])
redis.call('ZADD', KEYS[1], now, ARGV[1])
for _, id in ipairs(redis.call('HKEYS', KEYS[2])) do
    if id == ARGV[1] or string.sub(id, 1, #ARGV[1] + 1) == ARGV[1] .. '-' then redis.call('HDEL', KEYS[2], id) end
end
redis.call('DEL', KEYS[3])
