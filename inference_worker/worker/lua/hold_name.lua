-- KEYS the lease of a name; ARGV process, host, journal, milliseconds, '1' for a process that starts. Takes or renews
-- the lease. Returns an empty list, or the process, the host and the renewals of the holder if it is another process.
-- A starting process takes it from one that leaves, and from one with the same journal, whose lock it has.
local holder = redis.call('HMGET', KEYS[1], 'process', 'host', 'renewals', 'journal', 'leaving')
if holder[1] == ARGV[1] then
    redis.call('HINCRBY', KEYS[1], 'renewals', 1)
elseif holder[1] and not (ARGV[5] == '1' and (holder[5] or holder[4] == ARGV[3])) then
    return {holder[1], holder[2], holder[3]}
else
    redis.call('DEL', KEYS[1])
    redis.call('HSET', KEYS[1], 'process', ARGV[1], 'host', ARGV[2], 'journal', ARGV[3], 'renewals', 0)
end
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return {}
