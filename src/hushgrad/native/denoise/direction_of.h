/* Adam's moments for one vector width: a plain loop, which compilers turn into vectors by themselves. */

TARGET static void NAME(direction)(const float *restrict g, float *restrict mean, float *restrict square, float *restrict out,
                                   size_t n, float fresh1, float fresh2, float noise, float floor, float factor) {
    for (size_t i = 0; i < n; i++) {
        const float m = mean[i] + fresh1 * (g[i] - mean[i]), s = (1 - fresh2) * square[i] + fresh2 * (g[i] * g[i]);
        const float above = s - noise;
        mean[i] = m;
        square[i] = s;
        out[i] = m * factor / sqrtf(above > floor ? above : floor);
    }
}
