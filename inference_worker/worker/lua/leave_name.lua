-- KEYS the lease of a name; ARGV process, '1' to end it. Otherwise it is marked, so that a successor may take it.
if redis.call('HGET', KEYS[1], 'process') ~= ARGV[1] then return end
if ARGV[2] == '1' then redis.call('DEL', KEYS[1]) else redis.call('HSET', KEYS[1], 'leaving', 1) end
