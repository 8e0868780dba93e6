-- KEYS: answer, flight, index. ARGV: leader, answer, seconds, now, maximum number of answers. An empty answer is not
-- stored. The flight ends if it is the leader's.
if ARGV[2] ~= '' then
  redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', ARGV[4])
  redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[3])
  redis.call('ZADD', KEYS[3], ARGV[4] + ARGV[3], KEYS[1])
  local excess = redis.call('ZCARD', KEYS[3]) - ARGV[5]
  if excess > 0 then
    local first = redis.call('ZPOPMIN', KEYS[3], excess)
    for i = 1, #first, 2 do redis.call('DEL', first[i]) end
  end
  if redis.call('TTL', KEYS[3]) < tonumber(ARGV[3]) then redis.call('EXPIRE', KEYS[3], ARGV[3]) end
end
if redis.call('GET', KEYS[2]) == ARGV[1] then redis.call('DEL', KEYS[2]) end
return 1
