-- KEYS: the cached copies. ARGV: their TTL in seconds; then, for each key, the new snapshot and its version.
for index, name in ipairs(KEYS) do
    local payload, version = ARGV[2 * index], tonumber(ARGV[2 * index + 1])
    local cached = redis.call('GET', name)
    if not cached or cmsgpack.unpack(cached)['version'] <= version then
        redis.call('SET', name, payload, 'EX', ARGV[1])
    end
end
