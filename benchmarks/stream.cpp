// The memory pattern of AdamW without its arithmetic: four arrays read, three of them written.
#include <cstdint>

extern "C" void four_read_three_write(float* __restrict p, float* __restrict m, float* __restrict v,
                                      const float* __restrict g, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
        const float x = g[i];
        p[i] += x;
        m[i] += x;
        v[i] += x;
    }
}
