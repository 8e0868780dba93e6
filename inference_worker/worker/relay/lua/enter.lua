-- KEYS limits, leases; ARGV tokens of the request, lease, concurrency limit or '', duration of a lease, longest
-- pause after a request that a bucket demands. Returns the milliseconds to wait and the reason, or 0 and the
-- numbers of requests and tokens that were sent before; then 1 if at least half of each limit is left. Only if nothing
-- is to be waited for, the buckets are reduced and the lease is taken.
local state, wait, reason, is_ample = load(KEYS[1]), 0, '', 1
local function delay(ms, why)
    if ms > wait then wait, reason = ms, why end
end
if state.resumes_at then delay(state.resumes_at - now, 'retry_after') end
local changes = {}
for i, name in ipairs({'requests', 'tokens'}) do
    local limit = state[name .. '_limit']
    if limit then
        local rate = state[name .. '_rate']
        local left = math.min(limit, state[name .. '_left'] + rate * math.max(0, now - state[name .. '_at']))
        local amount = math.min(i == 1 and 1 or tonumber(ARGV[1]), limit)
        local longest = state[name .. '_at'] + ARGV[5] - now
        if left < amount then delay(math.min(math.max(1, math.ceil((amount - left) / rate)), longest), name) end
        if left - amount < limit / 2 then is_ample = 0 end
        for _, item in ipairs({name .. '_left', text(left - amount), name .. '_at', text(now)}) do
            changes[#changes + 1] = item
        end
    end
end
if ARGV[3] ~= '' then
    redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', text(now))
    local is_held = redis.call('ZSCORE', KEYS[2], ARGV[2])
    if not is_held and redis.call('ZCARD', KEYS[2]) >= tonumber(ARGV[3]) then
        delay({{poll_ms}}, 'concurrency')
    end
end
if wait > 0 then return {wait, reason, 0, 0, 0} end
if #changes > 0 then redis.call('HSET', KEYS[1], unpack(changes)) end
local sent, sent_tokens = 0, 0
if next(state) then
    sent = redis.call('HINCRBY', KEYS[1], 'sent', 1)
    sent_tokens = redis.call('HINCRBY', KEYS[1], 'sent_tokens', ARGV[1])
end
if ARGV[3] ~= '' then
    redis.call('ZADD', KEYS[2], text(now + ARGV[4]), ARGV[2])
    redis.call('PEXPIRE', KEYS[2], ARGV[4] * 2)
end
return {0, '', sent, sent_tokens, is_ample}
