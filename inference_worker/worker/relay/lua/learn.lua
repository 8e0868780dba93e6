-- KEYS limits; ARGV `sent` and `sent_tokens` of the request that was answered or '' if they are not known yet,
-- milliseconds of retry-after or '', then for each limit its name, limit, remaining and milliseconds until the reset.
-- What was sent after that request is deducted, because the upstream had not counted it.
local state, lasts = load(KEYS[1]), 0
if ARGV[3] ~= '' then
    local resumes_at = math.max(state.resumes_at or 0, now + tonumber(ARGV[3]))
    redis.call('HSET', KEYS[1], 'resumes_at', text(resumes_at))
end
lasts = math.max(lasts, (state.resumes_at or now) - now, tonumber(ARGV[3]) or 0)
for i = 4, #ARGV, 4 do
    local name, limit, remaining, reset = ARGV[i], tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2]), tonumber(ARGV[i + 3])
    local is_requests = name == 'requests'
    local sent = is_requests and state.sent or state.sent_tokens or 0
    local later = sent - (tonumber(is_requests and ARGV[1] or ARGV[2]) or sent)
    local left = math.max(-limit, remaining - math.max(0, later))
    local rate = limit / 60000
    if remaining < limit and reset > 0 then rate = (limit - remaining) / reset end
    redis.call('HSET', KEYS[1], name .. '_limit', text(limit), name .. '_left', text(left), name .. '_at', text(now),
        name .. '_rate', text(rate))
    lasts = math.max(lasts, reset)
end
redis.call('HSETNX', KEYS[1], 'sent', 0)
redis.call('HSETNX', KEYS[1], 'sent_tokens', 0)
redis.call('PEXPIRE', KEYS[1], text(math.ceil(lasts) + 60000))
local found = redis.call('HGETALL', KEYS[1])
found[#found + 1] = 'now'
found[#found + 1] = text(now)
return found
