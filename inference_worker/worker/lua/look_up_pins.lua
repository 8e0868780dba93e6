-- KEYS pins; ARGV hashes. The number of active pins, and a letter for each hash: m, minutes; h, an hour; -, no pin.
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now * 2 + 1))
local found = {}
for first = 1, #ARGV, 1000 do
    local scores = redis.call('ZMSCORE', KEYS[1], unpack(ARGV, first, math.min(first + 999, #ARGV)))
    for _, score in ipairs(scores) do
        found[#found + 1] = score and (tonumber(score) % 2 == 1 and 'h' or 'm') or '-'
    end
end
return {redis.call('ZCARD', KEYS[1]), table.concat(found)}
