-- KEYS leases; ARGV duration of a lease, leases. A lease that has expired meanwhile is taken again: its request runs.
for i = 2, #ARGV do redis.call('ZADD', KEYS[1], text(now + ARGV[1]), ARGV[i]) end
redis.call('PEXPIRE', KEYS[1], ARGV[1] * 2)
