-- KEYS record; ARGV call ID, ID of the request that it runs now.
if redis.call('HGET', KEYS[1], 'owner') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'request', ARGV[2])
return 1
