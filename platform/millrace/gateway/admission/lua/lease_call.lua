-- KEYS record; ARGV call ID, lease in ms. With 0 the next call can take over the record immediately.
if redis.call('HGET', KEYS[1], 'owner') ~= ARGV[1] then return 0 end
if ARGV[2] == '0' then redis.call('HSET', KEYS[1], 'owner', '') end
local time = redis.call('TIME')
return redis.call('HSET', KEYS[1], 'lease', time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[2])
