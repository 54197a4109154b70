#include "cpu/isa.h"

#include "cpu/memory.h"

#ifdef __x86_64__

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>

namespace zshard::cpu {

namespace {

Isa best() {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("x86-64-v4")) return Isa::kV4;
    if (__builtin_cpu_supports("x86-64-v3")) return Isa::kV3;
    return Isa::kBaseline;
}

Isa choose() {
    const char* wanted = std::getenv("ZSHARD_ISA");
    if (wanted == nullptr || std::string_view(wanted) == "auto") return best();
    const std::string_view names[] = {"baseline", "v3", "v4"};
    for (const Isa level : {Isa::kBaseline, Isa::kV3, Isa::kV4})
        if (names[static_cast<int>(level)] == wanted && level <= best()) return level;
    throw std::runtime_error(
        "zshard::ops: ZSHARD_ISA=" + std::string(wanted) +
        " is not one of auto, baseline, v3, v4, or this processor lacks it; unset it");
}

}  // namespace

const bool prefetches = [] {
    __builtin_cpu_init();
    return __builtin_cpu_is("intel") != 0;
}();

Isa isa() {
    static const Isa level = choose();
    return level;
}

}  // namespace zshard::cpu

#endif
