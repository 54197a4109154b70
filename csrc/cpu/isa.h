// Runs a loop compiled for the best vector instructions of this processor.
//
// The loop is a lambda. Each instantiation below inlines it, and all it calls, into a function of
// its own target, where the compiler vectorises it anew: no copy of the formulas, one object file,
// and no intrinsics but in stream_line. The lambda is told the level for the sake of those. The
// choice is made at run time. By [Note: same bits] it changes the speed only.
#pragma once

#include <cstdint>
#include <type_traits>

namespace zshard::cpu {

// The x86-64 levels: SSE2, AVX2, AVX-512. Elsewhere there is the baseline alone.
enum class Isa { kBaseline, kV3, kV4 };

template <Isa kIsa>
using IsaConstant = std::integral_constant<Isa, kIsa>;

#ifdef __x86_64__

#define ZSHARD_TARGET_V3 gnu::target("arch=x86-64-v3")
#define ZSHARD_TARGET_V4 gnu::target("arch=x86-64-v4,prefer-vector-width=512")

// The best level that this processor has, or the lower one that ZSHARD_ISA names. Throws on another
// value, so call it before threads do.
Isa isa();

inline void resolve_isa() { isa(); }

template <typename Body>
[[ZSHARD_TARGET_V4, gnu::flatten, gnu::noinline]]
void run_v4(const Body& body) {
    body(IsaConstant<Isa::kV4>{});
}

template <typename Body>
[[ZSHARD_TARGET_V3, gnu::flatten, gnu::noinline]]
void run_v3(const Body& body) {
    body(IsaConstant<Isa::kV3>{});
}

template <typename Body>
[[gnu::flatten, gnu::noinline]]
void run_baseline(const Body& body) {
    body(IsaConstant<Isa::kBaseline>{});
}

template <typename Body>
void vectorised(const Body& body) {
    switch (isa()) {
        case Isa::kV4:
            return run_v4(body);
        case Isa::kV3:
            return run_v3(body);
        case Isa::kBaseline:
            return run_baseline(body);
    }
}

#else

// Elsewhere (arm64) the baseline has vector instructions already.
inline void resolve_isa() {}

template <typename Body>
[[gnu::flatten, gnu::noinline]]
void vectorised(const Body& body) {
    body(IsaConstant<Isa::kBaseline>{});
}

#endif

// Calls f(i) for i in [begin, end) in a loop for the vectoriser. No iteration may depend on
// another: the buffers of a call do not overlap, but the compiler, which does not see __restrict
// through a lambda's captures, would check each pair at run time, and gives up where there are
// many.
template <typename F>
[[gnu::always_inline]] inline void each(int64_t begin, int64_t end, const F& f) {
#ifdef __clang__
#pragma clang loop vectorize(assume_safety)
#else
#pragma GCC ivdep
#endif
    for (int64_t i = begin; i < end; ++i) f(i);
}

}  // namespace zshard::cpu
