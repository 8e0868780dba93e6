-- KEYS: a replica's wakeups, the flag that a task was sent, its queue. ARGV: the TTL of the flag and that of the list in
-- milliseconds, the task's message, the wakeups.
if redis.call('SET', KEYS[2], '', 'NX', 'PX', ARGV[1]) then return redis.call('LPUSH', KEYS[3], ARGV[3]) end
redis.call('RPUSH', KEYS[1], unpack(ARGV, 4))
redis.call('PEXPIRE', KEYS[1], ARGV[2])
