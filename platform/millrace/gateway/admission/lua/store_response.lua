-- KEYS record, response, the tenant's responses by age, their total size; ARGV call ID, response (empty: too long to
-- store), TTL in seconds, maximum size of the tenant's responses in bytes.
if redis.call('HGET', KEYS[1], 'owner') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'done', 1)
redis.call('EXPIRE', KEYS[1], ARGV[3])
if #ARGV[2] == 0 then return 1 end
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local sum = tonumber(redis.call('GET', KEYS[4]) or 0)
local function drop(members)
    for _, member in ipairs(members) do
        local size, key = string.match(member, '(%d+) (.+)')
        redis.call('ZREM', KEYS[3], member)
        redis.call('DEL', key)
        sum = sum - size
    end
end
drop(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now - ARGV[3]))
redis.call('SET', KEYS[2], ARGV[2], 'EX', ARGV[3])
redis.call('ZADD', KEYS[3], now, #ARGV[2] .. ' ' .. KEYS[2])
sum = sum + #ARGV[2]
while sum > tonumber(ARGV[4]) do drop(redis.call('ZRANGE', KEYS[3], 0, 0)) end
redis.call('SET', KEYS[4], sum, 'EX', ARGV[3])
redis.call('EXPIRE', KEYS[3], ARGV[3])
return 1
