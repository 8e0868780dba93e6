/* Functions of each number of a vector. */

/* The exponential function, relative error 2e-7. Arguments are limited to [-87, 88], in which results are normal. */
INLINE floats exponential(floats x)
{
    const float magic = 12582912.0f; /* 1.5 * 2^23: the addition rounds to an integer */
    x = choose(x > -87.0f, x, fill(-87.0f));
    x = choose(x < 88.0f, x, fill(88.0f));
    floats shifted = x * 1.44269504f + magic;
    floats n = shifted - magic;
    x = x - n * 0.693359375f;
    x = x - n * -2.12194440e-4f;
    floats p = 1.9875691500e-4f * x + 1.3981999507e-3f;
    p = p * x + 8.3334519073e-3f;
    p = p * x + 4.1665795894e-2f;
    p = p * x + 1.6666665459e-1f;
    p = p * x + 5.0000001201e-1f;
    p = p * (x * x) + x + 1.0f;
    return (floats)((words)p + (((words)shifted - 0x4b400000) << 23));
}

/* 2^x for x up to 0, relative error 3e-7. Smaller arguments than -126 become -126, and NaN stays NaN. */
INLINE floats power_of_2(floats x)
{
    const float magic = 12582912.0f; /* 1.5 * 2^23: the addition rounds to an integer, which the lower bits contain */
    x = larger(fill(-126.0f), x);
    floats shifted = x + magic;
    x = x - (shifted - magic);
    floats p = 1.3400432653e-3f * x + 9.6760373563e-3f;
    p = p * x + 5.5503271520e-2f;
    p = p * x + 2.4022106826e-1f;
    p = p * x + 6.9314718246e-1f;
    p = p * x + 1.0f;
    return (floats)((words)p + ((words)shifted << 23));
}

INLINE floats activate(floats x, int64_t activation)
{
    if (activation == SILU)
        return x / (1.0f + exponential(-x));
    /* x / 2 * (1 + tanh(y)) = x / (1 + exp(-2 * y)) */
    floats y = 0.7978845608f * (x + 0.044715f * x * x * x);
    return x / (1.0f + exponential(-2.0f * y));
}

/* x * (1 + erf(x / sqrt(2))) / 2. The error function has an absolute error of 2e-7 (Abramowitz and Stegun, 7.1.26). */
INLINE floats apply_gelu(floats x)
{
    floats size = (floats)((words)x & 0x7fffffff) * 0.70710678f;
    floats t = 1.0f / (1.0f + 0.3275911f * size);
    floats p = 1.061405429f * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    floats rest = p * t * exponential(-size * size); /* 1 - erf(size) */
    return x * 0.5f * choose(x < 0, rest, 2.0f - rest);
}
