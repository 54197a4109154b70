#include "cpu/optim.h"

namespace zshard::cpu {

void adamw(const OptimArgs<Adamw>& args) { optim_step(args); }

}  // namespace zshard::cpu
