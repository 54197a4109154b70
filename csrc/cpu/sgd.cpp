#include "cpu/optim.h"

namespace zshard::cpu {

void sgd(const OptimArgs<Sgd>& args) { optim_step(args); }

}  // namespace zshard::cpu
