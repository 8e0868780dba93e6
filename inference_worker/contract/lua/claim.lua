-- KEYS claim; ARGV attempt, replica, call id, batch for the gateway. Returns the job and the number of its tenant's
-- pins, or nil if the attempt is not queued (any more). The batch reports the claim. After a lost response, a retry with
-- the same call id returns the same result.
local claim = redis.call('HMGET', KEYS[1], 'attempt', 'state', 'owner', 'claimed_by', 'tenant', 'job', 'gateway')
if claim[1] ~= ARGV[1] then return false end
local again = claim[2] == 'running' and claim[3] == ARGV[2] and ARGV[3] and claim[4] == ARGV[3]
if claim[2] ~= 'queued' and not again then return false end
redis.call('HSET', KEYS[1], 'state', 'running', 'owner', ARGV[2], 'claimed_by', ARGV[3] or '')
if ARGV[4] and claim[7] then
    local stream = '{{gateway_stream}}' .. claim[7]
    redis.call('XADD', stream, 'NOMKSTREAM', 'MAXLEN', '~', {{stream_length}}, '*', 'e', ARGV[4])
end
return {claim[6], redis.call('ZCARD', 'millrace:pins:' .. (claim[5] or ''))}
