-- KEYS: counters. ARGV: the time until which the attempt closed each. Counters closed by other attempts stay closed.
for i, key in ipairs(KEYS) do
    local stored = redis.call('HMGET', key, 'count', 'closed')
    if stored[1] then
        if tonumber(stored[1]) <= 1 then
            redis.call('DEL', key)
        else
            redis.call('HINCRBY', key, 'count', -1)
            if stored[2] == ARGV[i] then redis.call('HSET', key, 'closed', '0') end
        end
    end
end
