// The threads of cuda_runtime.h beside this: a fibre each, on a stack of its own. ASan, which warns
// of swapcontext, is told of every switch.
#include <cuda_runtime.h>
#include <sanitizer/common_interface_defs.h>
#include <ucontext.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "check.h"

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace zshard::device {

namespace {

// Room for two copies of a kernel's 32 KiB of arguments; ASan clears all of it at each switch.
constexpr size_t kStackBytes = 96 << 10;

struct Fibre {
    ucontext_t place;
    std::unique_ptr<char[]> stack = std::make_unique_for_overwrite<char[]>(kStackBytes);
    bool done;
    int value;       // brought to the barrier at which it waits
    bool at_warp;    // waits for the others of its warp alone
    double brought;  // to them
};
constexpr unsigned kWarp = 32;

std::vector<Fibre> fibres;  // of a block, by threadIdx.x
ucontext_t scheduler;
const void* scheduler_stack;
size_t scheduler_bytes;
const std::function<void()>* thread_body;
int barrier_value;
bool trapped;

// Leaves the current fibre for the scheduler, for good where it is done.
void leave() {
    Fibre& fibre = fibres[threadIdx.x];
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(fibre.done ? nullptr : &fake, scheduler_stack, scheduler_bytes);
    swapcontext(&fibre.place, &scheduler);
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
}

void wait_for_warp() {
    fibres[threadIdx.x].at_warp = true;
    leave();
}

void enter() {
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_bytes);
    try {
        (*thread_body)();
    } catch (const Trap&) {
        trapped = true;
    }
    fibres[threadIdx.x].done = true;
    leave();
}

void start(Fibre& fibre) {
    fibre.done = fibre.at_warp = false;
    getcontext(&fibre.place);
    fibre.place.uc_stack.ss_sp = fibre.stack.get();
    fibre.place.uc_stack.ss_size = kStackBytes;
    makecontext(&fibre.place, enter, 0);
}

void resume(unsigned thread) {
    threadIdx.x = thread;
    fibres[thread].at_warp = false;
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, fibres[thread].stack.get(), kStackBytes);
    swapcontext(&scheduler, &fibres[thread].place);
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
}

// Lets threads that wait for their warp go on, warp by warp, until none does.
void resume_warps(const std::vector<unsigned>& order) {
    while (!trapped) {
        std::vector<unsigned> waiting;
        std::vector<unsigned> of_warp(order.size() / kWarp + 1);
        for (const unsigned thread : order)
            if (fibres[thread].at_warp) {
                waiting.push_back(thread);
                ++of_warp[thread / kWarp];
            }
        if (waiting.empty()) return;
        for (const unsigned thread : waiting)
            test::check(of_warp[thread / kWarp] == kWarp, "a whole warp exchanges values",
                        test::where("thread", thread, "of them", of_warp[thread / kWarp]));
        for (const unsigned thread : waiting) resume(thread);
    }
}

}  // namespace

int barrier(int value) {
    fibres[threadIdx.x].value = value;
    leave();
    return barrier_value;
}

double shuffle_down(double value, unsigned delta) {
    const unsigned lane = threadIdx.x % kWarp,
                   from = lane + delta < kWarp ? threadIdx.x + delta : threadIdx.x;
    fibres[threadIdx.x].brought = value;
    wait_for_warp();
    const double other = fibres[from].brought;
    wait_for_warp();  // until all have read
    return other;
}

cudaError_t run(dim3 grid, dim3 block, const std::function<void()>& body) {
    gridDim = grid;
    blockDim = block;
    thread_body = &body;
    trapped = false;
    if (fibres.size() < block.x) fibres.resize(block.x);
    static std::minstd_rand generator;
    std::vector<unsigned> order(block.x);
    std::iota(order.begin(), order.end(), 0u);
    for (blockIdx.x = 0; blockIdx.x < grid.x && !trapped; ++blockIdx.x) {
        for (const unsigned thread : order) start(fibres[thread]);
        // From barrier to barrier, in a new order each time: no kernel may depend on one.
        unsigned done = 0;
        while (done == 0 && !trapped) {
            std::shuffle(order.begin(), order.end(), generator);
            for (const unsigned thread : order) resume(thread);
            resume_warps(order);
            int any = 0;
            for (const unsigned thread : order) {
                const Fibre& fibre = fibres[thread];
                any |= static_cast<int>(!fibre.done && fibre.value != 0);
                done += static_cast<unsigned>(fibre.done);
            }
            test::check(trapped || done == 0 || done == block.x, "all threads reach a barrier",
                        test::where("block", blockIdx.x, "threads that ended before it", done));
            barrier_value = any;
        }
    }
    return trapped ? 1 : cudaSuccess;
}

}  // namespace zshard::device
