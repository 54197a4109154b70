// Where the ranks of one host meet: counters in memory that they share, and a futex to wait on.
// Host only; Linux.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>
#include <stdexcept>
#include <string>
#include <system_error>

namespace zshard {

// [Note: arrivals and departures] A rank's memory that others read goes through rounds. In each the
// rank writes it and arrives; every rank, once all have arrived, reads what it needs of the others'
// and departs; and once all have departed, the memory may be written for the next round. Each rank
// counts its own arrivals and departures, and nobody else writes its counters: a rank is late where
// its count is below one's own. A rank that died leaves its counters behind, and holds no lock.
//
// The counts are 32 bits, as a futex has, and wrap around: they are compared by their difference.
struct alignas(64) Presence {
    std::atomic<uint32_t> arrived;
    std::atomic<uint32_t> departed;
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(Presence) == 64);

// One rank's view of a meeting place: a Presence for each rank, `stride` bytes apart, all 0 at
// first.
class Rendezvous {
 public:
    Rendezvous(uintptr_t memory, int64_t stride, int64_t world_size, int64_t rank)
        : memory_(memory), stride_(stride), world_size_(world_size), rank_(rank) {
        if (memory == 0 || memory % alignof(Presence) != 0 || stride % alignof(Presence) != 0)
            throw std::invalid_argument("rendezvous: memory " + std::to_string(memory) +
                                        " and stride " + std::to_string(stride) +
                                        " have to be multiples of 64 bytes, and not null");
        if (world_size < 1 || rank < 0 || rank >= world_size)
            throw std::invalid_argument("rendezvous: rank " + std::to_string(rank) +
                                        " is not in [0, " + std::to_string(world_size) + ")");
    }

    // What this rank's memory holds may be read: stores before this are seen by those who wait.
    void arrive() { advance(of(rank_).arrived); }

    // This rank has read what it needs of this round.
    void depart() { advance(of(rank_).departed); }

    // Waits until every rank has arrived as often as this one has; -1, or a rank that has not
    // within `seconds`, or as a signal came.
    int64_t await_arrivals(double seconds) const {
        return await(&Presence::arrived, of(rank_).arrived.load(), seconds);
    }

    // Waits until every rank has departed as often as this one has arrived; likewise.
    int64_t await_departures(double seconds) const {
        return await(&Presence::departed, of(rank_).arrived.load(), seconds);
    }

 private:
    using Counter = std::atomic<uint32_t>;
    using Clock = std::chrono::steady_clock;

    // Looks this often before it sleeps: where the ranks have cores of their own, the wait is
    // short.
    static constexpr int kLooks = 2000;

    Presence& of(int64_t rank) const {
        return *reinterpret_cast<Presence*>(memory_ + rank * stride_);
    }

    static void advance(Counter& counter) {
        counter.fetch_add(1, std::memory_order_acq_rel);
        syscall(SYS_futex, &counter, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }

    static bool reached(const Counter& counter, uint32_t count) {
        return static_cast<int32_t>(counter.load(std::memory_order_acquire) - count) >= 0;
    }

    int64_t await(Counter Presence::* which, uint32_t count, double seconds) const {
        const auto deadline = Clock::now() + std::chrono::duration<double>(seconds);
        for (int64_t rank = 0; rank < world_size_; ++rank)
            if (rank != rank_ && !await(of(rank).*which, count, deadline)) return rank;
        return -1;
    }

    static bool await(Counter& counter, uint32_t count,
                      std::chrono::time_point<Clock, std::chrono::duration<double>> deadline) {
        for (int look = 0; look < kLooks; ++look) {
            if (reached(counter, count)) return true;
            pause();
        }
        while (true) {
            const uint32_t seen = counter.load(std::memory_order_acquire);
            if (static_cast<int32_t>(seen - count) >= 0) return true;
            const std::chrono::duration<double> left = deadline - Clock::now();
            if (left.count() <= 0) return false;
            const auto whole = static_cast<time_t>(left.count());
            const timespec timeout{whole, static_cast<long>((left.count() - whole) * 1e9)};
            // Sleeps only while the counter is still as it was seen; any return means: look again.
            const long status =
                syscall(SYS_futex, &counter, FUTEX_WAIT, seen, &timeout, nullptr, 0);
            if (status != 0 && errno != EAGAIN && errno != ETIMEDOUT && errno != EINTR)
                throw std::system_error(errno, std::generic_category(),
                                        "waiting on shared memory (futex)");
            if (status != 0 && errno == EINTR)
                return reached(counter, count);  // a signal to handle
        }
    }

    static void pause() {
#ifdef __x86_64__
        __builtin_ia32_pause();
#endif
    }

    uintptr_t memory_;
    int64_t stride_, world_size_, rank_;
};

}  // namespace zshard
