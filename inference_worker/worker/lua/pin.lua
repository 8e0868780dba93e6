-- KEYS claim, pins; ARGV attempt, number of hashes pinned for five minutes, these hashes, hashes pinned for an hour.
-- Restarts the duration of each pin. The claim stores the new pins, which another attempt or a failure removes.
local claim = redis.call('HMGET', KEYS[1], 'attempt', 'state', 'pinned')
if claim[2] and (claim[1] ~= ARGV[1] or claim[2] ~= 'running') or claim[3] then return end
{{now}}
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', string.format('%.0f', now * 2 + 1))
local short, long = (now + 300000) * 2, (now + 3600000) * 2 + 1
local short_text, long_text = string.format('%.0f', short), string.format('%.0f', long)
local num_short, made = tonumber(ARGV[2]), {}
for first = 3, #ARGV, 1000 do
    local last = math.min(first + 999, #ARGV)
    local scores, pins = redis.call('ZMSCORE', KEYS[2], unpack(ARGV, first, last)), {}
    for i = first, last do
        local known = tonumber(scores[i - first + 1])
        local hour = i - 2 > num_short or (known and known % 2 == 1)
        pins[#pins + 1] = hour and long_text or short_text
        pins[#pins + 1] = ARGV[i]
        if not known then
            made[#made + 1] = ARGV[i]
            made[#made + 1] = hour and long or short
        end
    end
    redis.call('ZADD', KEYS[2], unpack(pins))
end
redis.call('PEXPIRE', KEYS[2], 3600000)
if claim[2] and #made > 0 then redis.call('HSET', KEYS[1], 'pinned', cmsgpack.pack(made)) end
