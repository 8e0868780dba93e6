-- The execution is not billed, so its pins are removed, except those that another execution has refreshed since.
local function unpin(claim)
    local made = redis.call('HMGET', claim, 'pinned', 'tenant')
    if not made[1] then return end
    redis.call('HDEL', claim, 'pinned')
    local key, pins = 'millrace:pins:' .. made[2], cmsgpack.unpack(made[1])
    for i = 1, #pins, 2 do
        if tonumber(redis.call('ZSCORE', key, pins[i])) == pins[i + 1] then redis.call('ZREM', key, pins[i]) end
    end
end
