-- KEYS slots; ARGV worker, milliseconds, for each slot whether the worker may take it. Returns the slots' workers.
local owners = {}
for i, key in ipairs(KEYS) do
    local owner = redis.call('GET', key)
    if owner == ARGV[1] or (not owner and ARGV[i + 2] == '1') then
        redis.call('SET', key, ARGV[1], 'PX', ARGV[2])
        owner = ARGV[1]
    end
    owners[i] = owner or ''
end
return owners
