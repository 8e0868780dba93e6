local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function text(number) return string.format('%.17g', number) end
local function load(key)
    local fields, state = redis.call('HGETALL', key), {}
    for i = 1, #fields, 2 do state[fields[i]] = tonumber(fields[i + 1]) end
    return state
end
