// The emulator's runtime: fibres, barriers, warp collectives and the checks on every access.
//
// One fibre per CUDA thread. A fibre runs until it waits; the lanes of a warp, then the warps of
// the block, each run as far as they go, in ascending or (reverse) descending order. Blocks run one
// after another.
//
// Every access of the kernel passes through access() before it happens. It lies in
//   the fibre's own stack, or the module's constants      free
//   a pointer argument (a "segment")                      must be one argument's bytes, aligned
//   the block's shared memory                             in bounds, aligned, written, ordered
//   anything else                                         an error: nothing is dereferenced
//
// Two accesses to a byte of shared memory, one of them a write, by different threads, are ordered
// by a __syncthreads between them, within a warp by a __syncwarp, and by a named barrier at which
// the earlier thread came before and the later one waited. Anything less is a race, and reported in
// whatever order the fibres happened to run. Shuffles and votes order nothing, as in CUDA.
//
// Of a launch that overlaps with the one before, every thread waits for that one before its first
// write to global memory, and before it reads what the launcher says is still being written.
#include "emulator.h"

#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <deque>
#include <vector>

extern "C" void emu_switch(void** save, void* load);
#if defined(__x86_64__)
// Callee-saved registers onto the old stack, stacks exchanged, registers off the new one.
asm(R"(.text
.globl emu_switch
.hidden emu_switch
emu_switch:
  push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp
  ret
)");
constexpr int SAVED_WORDS = 6;       // below the return address
#elif defined(__aarch64__)
asm(R"(.text
.globl emu_switch
.hidden emu_switch
emu_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
#else
#error "the emulator switches stacks on x86-64 and aarch64 only"
#endif

// ---------------------------------------------------------------- what the launcher passes

enum Space { SPACE_FREE, SPACE_GLOBAL, SPACE_SHARED, SPACE_UNKNOWN };
enum Access { ACCESS_LOAD, ACCESS_STORE, ACCESS_ATOMIC };
enum Counter { LOADS, STORES, ATOMICS, LOAD_BYTES, STORE_BYTES, DISTINCT_LOAD, DISTINCT_STORE,
               ARGUMENT_COUNTERS };
enum BlockCounter { SHARED_LOADS, SHARED_STORES, BARRIERS, BLOCK_COUNTERS };

struct Segment {
    unsigned char* base;
    uint64_t size;
    const unsigned char* owner;   // [size]: 1 + index of the pointer argument, 0 between elements;
                                  // null: all of it is `argument`
    int64_t argument;
    uint32_t* load_stamp;         // [size]: 1 + last block that loaded the byte; null: no trace
    uint32_t* store_stamp;
    const unsigned char* late;    // [size]: 1 where the launch before writes; null: nowhere
    int32_t stored;
};

struct StaticShared {
    uint64_t offset, size;
};

struct Launch {
    uint32_t grid[3], block[3];
    uint64_t dynamic_bytes;
    void (*kernel)();             // calls the kernel with the arguments of this launch
    Segment* segments;
    int32_t num_segments, num_statics;
    const StaticShared* statics;  // in the order of their offsets
    const unsigned char* read_only;      // [pointer arguments]
    uint64_t* counters;           // [blocks][pointer arguments][ARGUMENT_COUNTERS] or null
    uint64_t* block_counters;     // [blocks][BLOCK_COUNTERS] or null
    int32_t num_pointers, reverse;
    uint64_t max_accesses;        // of one thread between two waits
    int32_t overlap;              // the launch before may still run
};

struct Failure {
    int32_t failed, size, space, access;
    uint32_t block[3], thread[3];
    uint64_t address, pc, other_pc;      // pc: offsets into the kernel's module
    uint64_t shared_offset;
    char text[1024];
};

namespace {

constexpr int MAX_THREADS = 1024, WARP = 32;
constexpr size_t STACK = 256 << 10, MAX_DYNAMIC = 227 << 10, MAX_STATIC = 48 << 10;
constexpr size_t NEAR = 4096;        // this close behind the static arrays, they are what was meant
constexpr int16_t SEVERAL_WARPS = -1;

enum Wait { RUNNABLE, AT_BARRIER, AT_NAMED, AT_COLLECTIVE, EXITED };
enum Collective { WARP_SYNC, SHUFFLE, BALLOT, REDUCE, MMA, LDMATRIX, MOVMATRIX };
const char* const COLLECTIVE_NAMES[] = {"__syncwarp", "a shuffle", "a vote", "__reduce_*_sync",
                                        "mma", "ldmatrix", "movmatrix"};
const char* const BARRIER_NAMES[] = {"__syncthreads", "__syncthreads_count", "__syncthreads_and",
                                     "__syncthreads_or"};

struct Copy {
    unsigned char* to;
    unsigned char data[16];
    uint32_t pc;
};

struct Fiber {
    void* sp;
    unsigned char* stack;
    EmuIndex index;
    int number;
    Wait wait;
    int kind;                 // EmuBarrier or Collective
    unsigned mask;
    const char* file;
    int line;
    uint32_t pc;
    uint32_t in[11], out[4];
    const void* row;
    uint64_t accesses;
    bool ahead;               // of the wait for the launch before
    std::vector<Copy> open;
    std::deque<std::vector<Copy>> groups;
};

// Last write of a byte of shared memory, and the reads since the last barrier.
struct Shadow {
    uint32_t write_epoch, write_clock, write_part, write_pc;
    uint16_t writer;
    bool atomic, pending;     // pending: an asynchronous copy has not arrived
    int16_t read_warp;        // the warp of `lanes`, or SEVERAL_WARPS
    uint32_t read_epoch, read_clock, read_part, read_pc, lanes;
};

Launch* launch;
Failure* failure;
void* scheduler;
Fiber fibers[MAX_THREADS];
Fiber* current;
int num_threads, num_live, num_at_barrier;
EmuIndex block_idx;
uint32_t block_number;
bool aborted;

// Orders. `epoch` counts block barriers and never restarts, so the shadow needs no clearing:
// what is older than `first_epoch` belongs to an earlier block.
uint32_t epoch, first_epoch;
uint32_t clocks[MAX_THREADS / WARP];
uint32_t seen[MAX_THREADS][WARP];    // what a thread knows of its warp's lanes

// Named barriers cut a thread's life into parts: `part` counts its arrivals, and `across` says up
// to which part a thread knows another to have come. A barrier gathers what those who came knew.
constexpr int NUM_NAMED = 16;
struct Named {
    int come, expected;
    uint32_t known[MAX_THREADS];
};
Named named[NUM_NAMED];
uint32_t part[MAX_THREADS], across[MAX_THREADS][MAX_THREADS];
bool named_used;

alignas(1024) unsigned char dynamic_shared[MAX_DYNAMIC];
Shadow shadow[MAX_DYNAMIC + MAX_STATIC];
uintptr_t module_lo, module_hi, statics_lo, statics_size;

[[noreturn]] void abandon() {
    aborted = true;
    void* unused;
    emu_switch(&unused, scheduler);
    __builtin_unreachable();
}

uint32_t offset_of(const void* pc) { return uint32_t(uintptr_t(pc) - module_lo); }

// Describe the first failure; the caller leaves the fibres where they are.
void describe(const Fiber* f, uint32_t pc, const char* format, ...) {
    failure->failed = 1;
    failure->pc = pc;
    failure->block[0] = block_idx.x, failure->block[1] = block_idx.y;
    failure->block[2] = block_idx.z;
    failure->thread[0] = f->index.x, failure->thread[1] = f->index.y;
    failure->thread[2] = f->index.z;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(failure->text, sizeof failure->text, format, arguments);
    va_end(arguments);
}

[[noreturn]] void bad_access(const Fiber* f, const void* p, unsigned size, Access access,
                             Space space, uint32_t pc, const char* what, uint32_t other_pc = 0) {
    describe(f, pc, "%s", what);
    failure->address = uintptr_t(p);
    failure->size = size;
    failure->access = access;
    failure->space = space;
    failure->other_pc = other_pc;
    abandon();
}

// ---------------------------------------------------------------- global memory

bool global_access(const Fiber* f, uintptr_t p, unsigned size, Access access, uint32_t pc) {
    for (int i = 0; i < launch->num_segments; i++) {
        Segment& s = launch->segments[i];
        const uint64_t offset = p - uintptr_t(s.base);
        if (offset >= s.size) continue;
        const unsigned owner = s.owner ? s.owner[offset] : s.argument + 1;
        bool whole = owner != 0 && size <= s.size - offset;
        for (unsigned b = 1; s.owner && whole && b < size; b++)
            whole = s.owner[offset + b] == owner;
        if (!whole)
            bad_access(f, (void*)p, size, access, SPACE_GLOBAL, pc,
                       owner ? "access past the end of an argument, or into a gap of a strided one"
                             : "access to a gap between the elements of a strided argument");
        if (f->ahead && (access != ACCESS_LOAD ||
                         (s.late && memchr(s.late + offset, 1, size) != nullptr)))
            bad_access(f, (void*)p, size, access, SPACE_GLOBAL, pc,
                       "the launch before may still use this: access ahead of the wait for it");
        if (access != ACCESS_LOAD) {
            if (launch->read_only[owner - 1])
                bad_access(f, (void*)p, size, access, SPACE_GLOBAL, pc,
                           "store to a read-only argument");
            s.stored = 1;
        }
        if (launch->counters == nullptr) return true;
        uint64_t* count = launch->counters +
            (uint64_t(block_number) * launch->num_pointers + owner - 1) * ARGUMENT_COUNTERS;
        const uint32_t stamp = block_number + 1;
        if (access == ACCESS_ATOMIC) count[ATOMICS]++;
        if (access == ACCESS_LOAD) count[LOADS]++, count[LOAD_BYTES] += size;
        if (access == ACCESS_STORE) count[STORES]++, count[STORE_BYTES] += size;
        uint32_t* stamps = access == ACCESS_LOAD ? s.load_stamp : s.store_stamp;
        for (unsigned b = 0; b < size && access != ACCESS_ATOMIC; b++) {
            if (stamps[offset + b] == stamp) continue;
            stamps[offset + b] = stamp;
            count[access == ACCESS_LOAD ? DISTINCT_LOAD : DISTINCT_STORE]++;
        }
        return true;
    }
    return false;
}

// ---------------------------------------------------------------- shared memory

// True where an access by `earlier` of this epoch, at `clock` in its part `at`, happened before `f`
// runs.
bool ordered(int earlier, uint32_t clock, uint32_t at, const Fiber* f) {
    return earlier == f->number || across[f->number][earlier] >= at ||
           (earlier / WARP == f->number / WARP && seen[f->number][earlier % WARP] >= clock);
}

bool reads_ordered(const Shadow& s, const Fiber* f) {
    if (s.read_epoch != epoch) return true;
    if (s.read_warp == SEVERAL_WARPS) return false;
    for (int lane = 0; lane < WARP; lane++) {
        const int reader = s.read_warp * WARP + lane;
        if (s.lanes >> lane & 1 && !ordered(reader, s.read_clock, s.read_part, f)) return false;
    }
    return true;
}

// Place in the shadow of an address of shared memory; false: outside it, or across its end.
bool find_shared(uintptr_t p, unsigned size, uint64_t& place, bool& inside) {
    uint64_t offset = p - uintptr_t(dynamic_shared);
    if (offset < MAX_DYNAMIC) {
        place = offset;
        inside = offset + size <= launch->dynamic_bytes;
        return true;
    }
    offset = p - statics_lo;
    if (offset >= statics_size + NEAR) return false;
    place = MAX_DYNAMIC + offset;
    inside = false;
    for (int i = 0; i < launch->num_statics; i++) {
        const StaticShared& v = launch->statics[i];
        inside |= offset >= v.offset && offset + size <= v.offset + v.size;
    }
    return true;
}

void shared_access(const Fiber* f, uintptr_t p, unsigned size, Access access, uint32_t pc,
                   uint64_t place, bool copy = false) {
    const int warp = f->number / WARP, lane = f->number % WARP;
    if (launch->block_counters != nullptr)
        launch->block_counters[uint64_t(block_number) * BLOCK_COUNTERS +
                               (access == ACCESS_LOAD ? SHARED_LOADS : SHARED_STORES)]++;
    auto fail = [&](const char* what, uint32_t other) {
        failure->shared_offset = place;
        bad_access(f, (void*)p, size, access, SPACE_SHARED, pc, what, other);
    };
    for (Shadow* s = shadow + place; s < shadow + place + size; s++) {
        const bool written = s->write_epoch >= first_epoch;
        const bool mine = !written || s->write_epoch != epoch ||
                          (access == ACCESS_ATOMIC && s->atomic) ||
                          ordered(s->writer, s->write_clock, s->write_part, f);
        if (written && s->pending)
            fail(access == ACCESS_LOAD
                     ? "read of shared memory before its asynchronous copy arrived"
                     : "write to shared memory under an asynchronous copy",
                 s->write_pc);
        if (access != ACCESS_STORE && !written) fail("read of unwritten shared memory", 0);
        if (!mine)
            fail(access == ACCESS_LOAD ? "race: read of shared memory that another thread wrote "
                                         "with no barrier in between"
                                       : "race: two threads write the same shared memory with no "
                                         "barrier in between", s->write_pc);
        if (access == ACCESS_LOAD) {
            if (s->read_epoch != epoch)
                s->read_epoch = epoch, s->read_warp = warp, s->lanes = 0;
            if (s->read_warp == warp) s->lanes |= 1u << lane;
            else s->read_warp = SEVERAL_WARPS;
            s->read_clock = clocks[warp];
            s->read_part = part[f->number];
            s->read_pc = pc;
            continue;
        }
        if (!reads_ordered(*s, f))
            fail("race: write to shared memory that another thread read with no barrier in between",
                 s->read_pc);
        s->write_epoch = epoch, s->write_clock = clocks[warp], s->write_pc = pc;
        s->write_part = part[f->number];
        s->writer = f->number, s->atomic = access == ACCESS_ATOMIC, s->pending = copy;
        s->read_epoch = 0;
    }
}

// ---------------------------------------------------------------- any access

Space access(Fiber* f, const void* address, unsigned size, Access access, const void* caller,
             bool aligned = true) {
    const uintptr_t p = uintptr_t(address);
    if (++f->accesses > launch->max_accesses)
        bad_access(f, address, size, access, SPACE_FREE, offset_of(caller),
                   "the thread makes no progress (an endless loop?)");
    if (p - uintptr_t(f->stack) < STACK) return SPACE_FREE;
    const uint32_t pc = offset_of(caller);
    uint64_t place;
    bool inside;
    const bool shared = find_shared(p, size, place, inside);
    if (!shared && p - module_lo < module_hi - module_lo) return SPACE_FREE;
    const bool misaligned = aligned && p % size != 0;
    if (shared) {
        failure->shared_offset = place;
        if (!inside)
            bad_access(f, address, size, access, SPACE_SHARED, pc, "access past shared memory");
        if (misaligned) bad_access(f, address, size, access, SPACE_SHARED, pc, "misaligned access");
        shared_access(f, p, size, access, pc, place);
        return SPACE_SHARED;
    }
    if (!global_access(f, p, size, access, pc))
        bad_access(f, address, size, access, SPACE_UNKNOWN, pc, "access out of bounds");
    if (misaligned) bad_access(f, address, size, access, SPACE_GLOBAL, pc, "misaligned access");
    return SPACE_GLOBAL;
}

// ---------------------------------------------------------------- waiting

void pause() {
    Fiber* me = current;
    me->accesses = 0;
    emu_switch(&me->sp, scheduler);
}

const Fiber* first_in(Wait wait) {
    for (int i = 0; i < num_threads; i++)
        if (fibers[i].wait == wait) return &fibers[i];
    return nullptr;
}

int count_in(Wait wait) {
    int n = 0;
    for (int i = 0; i < num_threads; i++) n += fibers[i].wait == wait;
    return n;
}

// Release the block barrier once every thread that has not exited waits there. False: an error.
bool try_barrier() {
    if (num_at_barrier == 0 || num_at_barrier < num_live) return true;
    const Fiber* first = first_in(AT_BARRIER);
    if (num_live < num_threads) {
        const Fiber* gone = first_in(EXITED);
        describe(first, first->pc,
                 "divergent barrier: %d threads wait at %s (%s:%d) but %d have exited, the first "
                 "of them thread %d", num_at_barrier, BARRIER_NAMES[first->kind], first->file,
                 first->line, num_threads - num_live, gone->number);
        return false;
    }
    int sum = 0;
    for (int i = 0; i < num_threads; i++) {
        const Fiber& f = fibers[i];
        if (f.kind != first->kind || f.line != first->line || strcmp(f.file, first->file) != 0) {
            describe(first, first->pc,
                     "divergent barrier: thread %d waits at %s (%s:%d), thread %d at %s (%s:%d)",
                     first->number, BARRIER_NAMES[first->kind], first->file, first->line, f.number,
                     BARRIER_NAMES[f.kind], f.file, f.line);
            return false;
        }
        sum += f.in[0] != 0;
    }
    const int all = sum == num_threads, any = sum != 0;
    const int results[] = {0, sum, all, any};
    for (int i = 0; i < num_threads; i++) {
        fibers[i].out[0] = results[first->kind];
        fibers[i].wait = RUNNABLE;
    }
    num_at_barrier = 0;
    epoch++;
    if (launch->block_counters != nullptr)
        launch->block_counters[uint64_t(block_number) * BLOCK_COUNTERS + BARRIERS]++;
    return true;
}

float element(uint32_t word, int half, EmuElement type) {
    const uint32_t bits = half ? word >> 16 : word & 0xffff;
    if (type == EMU_BF16) {
        const uint32_t wide = bits << 16;
        float f;
        memcpy(&f, &wide, 4);
        return f;
    }
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float magnitude = exponent == 31 ? (fraction ? NAN : INFINITY)
                            : exponent == 0 ? std::ldexp(float(fraction), -24)
                                            : std::ldexp(float(fraction + 1024), exponent - 25);
    return bits & 0x8000 ? -magnitude : magnitude;
}

// d[16][8] += a[16][16] . b[16][8]; lane 4g + t holds rows g, g + 8 and columns 2t, 2t + 1 (+ 8)
// (PTX ISA, matrix fragments of mma.m16n8k16). Products are exact in float64; one rounding a sum.
void multiply(Fiber* lanes, EmuElement type) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < WARP; lane++) {
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; i++)
            for (int half = 0; half < 2; half++)
                a[g + 8 * (i % 2)][2 * t + half + 8 * (i / 2)] =
                    element(lanes[lane].in[4 + i], half, type);
        for (int i = 0; i < 2; i++)
            for (int half = 0; half < 2; half++)
                b[2 * t + half + 8 * i][g] = element(lanes[lane].in[8 + i], half, type);
    }
    for (int lane = 0; lane < WARP; lane++)
        for (int i = 0; i < 4; i++) {
            const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
            float start;
            memcpy(&start, &lanes[lane].in[i], 4);
            double sum = start;
            for (int k = 0; k < 16; k++) sum += double(a[row][k]) * b[k][column];
            const float result = float(sum);
            memcpy(&lanes[lane].out[i], &result, 4);
        }
}

uint32_t combine(EmuReduce op, uint32_t a, uint32_t b) {
    switch (op) {
        case EMU_ADD: return a + b;
        case EMU_MIN: return int32_t(a) < int32_t(b) ? a : b;
        case EMU_MAX: return int32_t(a) > int32_t(b) ? a : b;
        case EMU_UMIN: return a < b ? a : b;
        case EMU_UMAX: return a > b ? a : b;
        case EMU_AND: return a & b;
        case EMU_OR: return a | b;
        default: return a ^ b;
    }
}

// Carry out a collective whose lanes `group` (a bit each) have all arrived. False: an error.
bool carry_out(Fiber* lanes, unsigned group) {
    const int first = __builtin_ctz(group), warp = lanes[0].number / WARP;
    Fiber& f = lanes[first];
    const bool whole_warp = f.kind == MMA || f.kind == LDMATRIX || f.kind == MOVMATRIX;
    if (whole_warp && group != 0xffffffffu) {
        describe(&f, f.pc, "%s (%s:%d) needs all 32 lanes of the warp; lanes 0x%08x take part",
                 COLLECTIVE_NAMES[f.kind], f.file, f.line, group);
        return false;
    }
    auto each = [&](auto body) {
        for (int lane = 0; lane < WARP; lane++)
            if (group >> lane & 1) body(lanes[lane], lane);
    };
    bool good = true;
    uint32_t value = f.in[0];
    switch (f.kind) {
        case WARP_SYNC: {
            uint32_t known[WARP] = {};
            each([&](Fiber& x, int) {
                for (int k = 0; k < WARP; k++) known[k] = std::max(known[k], seen[x.number][k]);
            });
            each([&](Fiber&, int lane) { known[lane] = clocks[warp]; });
            each([&](Fiber& x, int) { memcpy(seen[x.number], known, sizeof known); });
            clocks[warp]++;
            break;
        }
        case SHUFFLE:
            each([&](Fiber& x, int) {
                const unsigned source = x.in[2];
                if (source >= WARP || !(group >> source & 1)) {
                    if (good)
                        describe(&x, x.pc, "shuffle (%s:%d) from lane %u, which does not take part",
                                 x.file, x.line, source);
                    good = false;
                    return;
                }
                memcpy(x.out, lanes[source].in, 8);
            });
            break;
        case BALLOT:
            value = 0;
            each([&](Fiber& x, int lane) { value |= unsigned(x.in[0] != 0) << lane; });
            each([&](Fiber& x, int) { x.out[0] = value; });
            break;
        case REDUCE:
            each([&](Fiber& x, int lane) {
                if (lane != first) value = combine(EmuReduce(f.in[1]), value, x.in[0]);
            });
            each([&](Fiber& x, int) { x.out[0] = value; });
            break;
        case MMA:
            multiply(lanes, EmuElement(f.in[10]));
            break;
        default: {   // LDMATRIX, MOVMATRIX: 8 x 8 matrices of 16-bit elements, one word a lane
            const bool loads = f.kind == LDMATRIX, transpose = !loads || f.in[1];
            const int matrices = loads ? f.in[0] : 1;
            uint16_t m[4][8][8];
            for (int lane = 0; lane < WARP; lane++) {
                if (loads && lane < 8 * matrices)
                    memcpy(m[lane / 8][lane % 8], lanes[lane].row, 16);
                if (!loads) memcpy(&m[0][lane / 4][2 * (lane % 4)], lanes[lane].in, 4);
            }
            for (int lane = 0; lane < WARP; lane++)
                for (int i = 0; i < matrices; i++) {
                    const int r = lane / 4, c = 2 * (lane % 4);
                    const uint32_t low = transpose ? m[i][c][r] : m[i][r][c];
                    const uint32_t high = transpose ? m[i][c + 1][r] : m[i][r][c + 1];
                    lanes[lane].out[i] = low | high << 16;
                }
        }
    }
    each([&](Fiber& x, int) { x.wait = RUNNABLE; });
    return good;
}

// Complete what the lanes of a warp wait for, where everyone named in the mask is there or gone.
bool try_collectives(int warp) {
    Fiber* lanes = fibers + warp * WARP;
    const int count = std::min(WARP, num_threads - warp * WARP);
    for (int lane = 0; lane < count; lane++) {
        const Fiber& f = lanes[lane];
        if (f.wait != AT_COLLECTIVE) continue;
        unsigned group = 0;
        bool complete = true;
        for (int other = 0; other < count && complete; other++) {
            if (!(f.mask >> other & 1) || lanes[other].wait == EXITED) continue;
            const Fiber& o = lanes[other];
            complete = o.wait == AT_COLLECTIVE && o.mask == f.mask && o.kind == f.kind;
            group |= 1u << other;
        }
        if (complete && !carry_out(lanes, group)) return false;
    }
    return true;
}

void collective(Collective kind, unsigned mask, const char* file, int line, const void* caller) {
    Fiber* me = current;
    me->kind = kind, me->mask = mask, me->file = file, me->line = line;
    me->pc = offset_of(caller);
    if (!(mask >> me->number % WARP & 1)) {
        describe(me, me->pc, "%s (%s:%d) with mask 0x%08x, which leaves out the calling lane",
                 COLLECTIVE_NAMES[kind], file, line, mask);
        abandon();
    }
    me->wait = AT_COLLECTIVE;
    if (!try_collectives(me->number / WARP)) abandon();
    if (me->wait == AT_COLLECTIVE) pause();
}

// Nobody can run: say who waits where.
void describe_deadlock() {
    char text[900];
    int length = 0;
    const Fiber* reported = nullptr;
    for (Wait wait : {AT_BARRIER, AT_NAMED, AT_COLLECTIVE, EXITED}) {
        const Fiber* f = first_in(wait);
        if (f == nullptr) continue;
        length += snprintf(text + length, sizeof text - length, "%s%d threads (first: %d) ",
                           length ? "; " : "", count_in(wait), f->number);
        if (wait == EXITED) {
            length += snprintf(text + length, sizeof text - length, "have exited");
            continue;
        }
        if (reported == nullptr) reported = f;
        const char* name = wait == AT_BARRIER ? BARRIER_NAMES[f->kind]
                           : wait == AT_NAMED ? "bar.sync" : COLLECTIVE_NAMES[f->kind];
        length += snprintf(text + length, sizeof text - length, "wait at %s (%s:%d)", name, f->file,
                           f->line);
        if (wait == AT_COLLECTIVE)
            length += snprintf(text + length, sizeof text - length, " with mask 0x%08x", f->mask);
    }
    describe(reported, reported->pc, "divergent barrier, no thread can go on: %s", text);
}

// ---------------------------------------------------------------- running

void fiber_main() {
    launch->kernel();
    Fiber* me = current;
    me->wait = EXITED;
    num_live--;
    if (!try_collectives(me->number / WARP) || !try_barrier()) abandon();
    pause();
    __builtin_unreachable();
}

void prepare_fiber(Fiber& f, int number) {
    const uint32_t* b = launch->block;
    if (f.stack == nullptr)
        f.stack = (unsigned char*)mmap(nullptr, STACK, PROT_READ | PROT_WRITE,
                                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    f.number = number;
    f.index = {number % b[0], number / b[0] % b[1], number / (b[0] * b[1])};
    f.wait = RUNNABLE;
    f.accesses = 0;
    f.ahead = launch->overlap;
    f.open.clear();
    f.groups.clear();
    void** top = (void**)(f.stack + STACK) - 2;      // 16-byte aligned
#if defined(__x86_64__)
    *--top = nullptr;                                // as if fiber_main had been called
    *--top = (void*)fiber_main;
    f.sp = top - SAVED_WORDS;
#else
    top -= 20;
    top[11] = (void*)fiber_main;                     // x30, the return address
    f.sp = top;
#endif
}

// Run the lanes of one warp until none of them can go on. True: something ran.
bool run_warp(int warp) {
    const int first = warp * WARP, count = std::min(WARP, num_threads - first);
    bool ran = false;
    for (bool again = true; again && !aborted;) {
        again = false;
        for (int i = 0; i < count && !aborted; i++) {
            Fiber& f = fibers[first + (launch->reverse ? count - 1 - i : i)];
            if (f.wait != RUNNABLE) continue;
            again = ran = true;
            current = &f;
            emu_switch(&scheduler, f.sp);
        }
    }
    return ran;
}

void run_block() {
    const int warps = (num_threads + WARP - 1) / WARP;
    num_live = num_threads;
    num_at_barrier = 0;
    first_epoch = ++epoch;
    for (int w = 0; w < warps; w++) clocks[w] = 1;
    memset(seen, 0, sizeof seen[0] * num_threads);
    for (int t = 0; t < num_threads; t++) part[t] = 1;
    if (named_used) memset(across, 0, sizeof across[0] * num_threads);
    named_used = false;
    memset(dynamic_shared, 0xff, launch->dynamic_bytes);     // NaN in every float format
    memset((void*)statics_lo, 0xff, statics_size);
    for (int i = 0; i < num_threads; i++) prepare_fiber(fibers[i], i);
    while (num_live > 0 && !aborted) {
        bool ran = false;
        for (int w = 0; w < warps && !aborted; w++)
            ran |= run_warp(launch->reverse ? warps - 1 - w : w);
        if (!ran && num_live > 0 && !aborted) {
            describe_deadlock();
            aborted = true;
        }
    }
    for (int barrier = 0; barrier < NUM_NAMED; barrier++) {
        if (named[barrier].come > 0 && !aborted) {
            describe(&fibers[0], 0, "barrier %d is left with %d of %d threads", barrier,
                     named[barrier].come, named[barrier].expected);
            aborted = true;
        }
        named[barrier].come = 0;
    }
}

// The kernel's module: its addresses and its block of thread-local storage, which holds the static
// __shared__ arrays.
int find_module(dl_phdr_info* info, size_t, void*) {
    const uintptr_t here = uintptr_t(launch->kernel);
    uintptr_t lo = ~uintptr_t(0), hi = 0, tls = 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr)& h = info->dlpi_phdr[i];
        if (h.p_type == PT_LOAD) {
            lo = std::min(lo, uintptr_t(info->dlpi_addr + h.p_vaddr));
            hi = std::max(hi, uintptr_t(info->dlpi_addr + h.p_vaddr + h.p_memsz));
        }
        if (h.p_type == PT_TLS) tls = h.p_memsz;
    }
    if (here < lo || here >= hi) return 0;
    module_lo = info->dlpi_addr, module_hi = hi;
    statics_lo = uintptr_t(info->dlpi_tls_data), statics_size = tls;
    return 1;
}

}  // namespace

extern "C" int emu_run(Launch* what, Failure* where) {
    launch = what;
    failure = where;
    aborted = false;
    dl_iterate_phdr(find_module, nullptr);
    const uint32_t *g = launch->grid, *b = launch->block;
    num_threads = b[0] * b[1] * b[2];
    const uint32_t blocks = g[0] * g[1] * g[2];
    for (uint32_t i = 0; i < blocks && !aborted; i++) {
        block_number = launch->reverse ? blocks - 1 - i : i;
        block_idx = {block_number % g[0], block_number / g[0] % g[1],
                     block_number / (g[0] * g[1])};
        run_block();
    }
    current = nullptr;
    return where->failed;
}

// ---------------------------------------------------------------- the twins' side

#define CALLER __builtin_return_address(0)

extern "C" {
EmuIndex emu_thread_idx() { return current->index; }
EmuIndex emu_block_idx() { return block_idx; }
EmuIndex emu_block_dim() { return {launch->block[0], launch->block[1], launch->block[2]}; }
EmuIndex emu_grid_dim() { return {launch->grid[0], launch->grid[1], launch->grid[2]}; }
int emu_lane() { return current->number % WARP; }
unsigned char* emu_dynamic_shared() { return dynamic_shared; }

int emu_block_barrier(EmuBarrier kind, int predicate, const char* file, int line) {
    Fiber* me = current;
    me->kind = kind, me->file = file, me->line = line, me->pc = offset_of(CALLER);
    me->in[0] = predicate;
    me->wait = AT_BARRIER;
    num_at_barrier++;
    if (!try_barrier()) abandon();
    if (me->wait == AT_BARRIER) pause();
    return me->out[0];
}

void emu_named_barrier(int barrier, int threads, int waits, const char* file, int line) {
    Fiber* me = current;
    me->file = file, me->line = line, me->pc = offset_of(CALLER);
    Named& b = named[barrier % NUM_NAMED];
    if (b.come == 0) b.expected = threads, memset(b.known, 0, sizeof b.known[0] * num_threads);
    if (barrier < 0 || barrier >= NUM_NAMED || threads % WARP || threads != b.expected) {
        describe(me, me->pc,
                 "barrier %d (%s:%d) for %d threads; it must be one of 0 to 15, for whole warps, "
                 "as many as those who came before said (%d)", barrier, file, line, threads,
                 b.expected);
        abandon();
    }
    named_used = true;
    for (int t = 0; t < num_threads; t++) b.known[t] = std::max(b.known[t], across[me->number][t]);
    b.known[me->number] = part[me->number]++;
    if (waits) me->wait = AT_NAMED, me->kind = barrier;
    if (++b.come == b.expected) {
        b.come = 0;
        for (int i = 0; i < num_threads; i++) {
            if (fibers[i].wait != AT_NAMED || fibers[i].kind != barrier) continue;
            fibers[i].wait = RUNNABLE;
            for (int t = 0; t < num_threads; t++)
                across[i][t] = std::max(across[i][t], b.known[t]);
        }
    }
    if (me->wait == AT_NAMED) pause();
}

void emu_warp_sync(unsigned mask, const char* file, int line) {
    collective(WARP_SYNC, mask, file, line, CALLER);
}

uint64_t emu_shuffle(unsigned mask, uint64_t value, int source, const char* file, int line) {
    Fiber* me = current;
    memcpy(me->in, &value, 8);
    me->in[2] = source;
    collective(SHUFFLE, mask, file, line, CALLER);
    memcpy(&value, me->out, 8);
    return value;
}

unsigned emu_ballot(unsigned mask, int predicate, const char* file, int line) {
    current->in[0] = predicate;
    collective(BALLOT, mask, file, line, CALLER);
    return current->out[0];
}

uint32_t emu_reduce(unsigned mask, EmuReduce op, uint32_t value, const char* file, int line) {
    current->in[0] = value, current->in[1] = op;
    collective(REDUCE, mask, file, line, CALLER);
    return current->out[0];
}

EmuFloats emu_mma_m16n8k16(EmuFloats d, EmuWords a, EmuWords b, EmuElement type, const char* file,
                           int line) {
    Fiber* me = current;
    memcpy(me->in, &d, 16);
    memcpy(me->in + 4, &a, 16);
    memcpy(me->in + 8, &b, 8);
    me->in[10] = type;
    collective(MMA, 0xffffffffu, file, line, CALLER);
    EmuFloats result;
    memcpy(&result, me->out, 16);
    return result;
}

EmuWords emu_ldmatrix(const void* row, int matrices, bool transpose, const char* file, int line) {
    Fiber* me = current;
    if (me->number % WARP < 8 * matrices &&
        access(me, row, 16, ACCESS_LOAD, CALLER) != SPACE_SHARED)
        bad_access(me, row, 16, ACCESS_LOAD, SPACE_UNKNOWN, offset_of(CALLER),
                   "ldmatrix from memory that is not shared");
    me->row = row;
    me->in[0] = matrices, me->in[1] = transpose;
    collective(LDMATRIX, 0xffffffffu, file, line, CALLER);
    EmuWords result;
    memcpy(&result, me->out, 16);
    return result;
}

uint32_t emu_movmatrix(uint32_t value, const char* file, int line) {
    current->in[0] = value;
    collective(MOVMATRIX, 0xffffffffu, file, line, CALLER);
    return current->out[0];
}

uint64_t emu_atomic_begin(const void* p, unsigned size) {
    access(current, p, size, ACCESS_ATOMIC, CALLER);
    uint64_t value = 0;
    memcpy(&value, p, size);
    return value;
}

void emu_atomic_end(void* p, unsigned size, uint64_t value) { memcpy(p, &value, size); }

EmuWords emu_load_16(const void* p) {
    if (access(current, p, 16, ACCESS_LOAD, CALLER) != SPACE_GLOBAL)
        bad_access(current, p, 16, ACCESS_LOAD, SPACE_UNKNOWN, offset_of(CALLER),
                   "global load from memory that is not global");
    EmuWords v;
    memcpy(&v, p, 16);
    return v;
}

void emu_cp_async_16(void* shared, const void* global, int bytes) {
    Fiber* me = current;
    const uint32_t pc = offset_of(CALLER);
    const uintptr_t to = uintptr_t(shared);
    uint64_t place;
    bool inside;
    if (to % 16 != 0 || !find_shared(to, 16, place, inside) || !inside)
        bad_access(me, shared, 16, ACCESS_STORE, SPACE_UNKNOWN, pc,
                   "asynchronous copy to a place that is not 16 aligned bytes of shared memory");
    Copy copy = {(unsigned char*)shared, {}, pc};
    if (bytes > 0) {
        if (access(me, global, bytes, ACCESS_LOAD, CALLER, false) != SPACE_GLOBAL)
            bad_access(me, global, 16, ACCESS_LOAD, SPACE_UNKNOWN, pc,
                       "asynchronous copy from memory that is not global");
        if (uintptr_t(global) % 16 != 0)
            bad_access(me, global, 16, ACCESS_LOAD, SPACE_UNKNOWN, pc, "misaligned access");
        memcpy(copy.data, global, bytes);
    }
    shared_access(me, to, 16, ACCESS_STORE, pc, place, true);
    memset(shared, 0xff, 16);
    me->open.push_back(copy);
}

void emu_cp_async_commit() {
    current->groups.push_back(std::move(current->open));
    current->open.clear();
}

// Copies arrive here and not earlier: what the hardware may do at any time between, a missing wait
// must not survive.
void emu_cp_async_wait(int groups_left) {
    Fiber* me = current;
    while ((int)me->groups.size() > groups_left) {
        for (const Copy& copy : me->groups.front()) {
            uint64_t place;
            bool inside;
            find_shared(uintptr_t(copy.to), 16, place, inside);
            for (Shadow* s = shadow + place; s < shadow + place + 16; s++) {
                s->pending = false;
                s->write_epoch = epoch, s->write_clock = clocks[me->number / WARP];
            }
            memcpy(copy.to, copy.data, 16);
        }
        me->groups.pop_front();
    }
}

void emu_grid_wait() { current->ahead = false; }

void emu_launch_dependents(const char* file, int line) {
    if (!current->ahead) return;
    describe(current, offset_of(CALLER),
             "the launch behind is let go (%s:%d) ahead of the wait for the one before", file,
             line);
    abandon();
}

void emu_trap(const char* what, const char* file, int line) {
    describe(current, offset_of(CALLER), "%s (%s:%d)", what, file, line);
    abandon();
}

// ---------------------------------------------------------------- the compiler's hooks
// Called before every access of the kernel; outside a fibre (static initialisers) they do nothing.

#define HOOK(SIZE)                                                                             \
    void __tsan_read##SIZE(void* p) {                                                          \
        if (current) access(current, p, SIZE, ACCESS_LOAD, CALLER);                            \
    }                                                                                          \
    void __tsan_write##SIZE(void* p) {                                                         \
        if (current) access(current, p, SIZE, ACCESS_STORE, CALLER);                           \
    }                                                                                          \
    void __tsan_unaligned_read##SIZE(void* p) {                                                \
        if (current) access(current, p, SIZE, ACCESS_LOAD, CALLER, false);                     \
    }                                                                                          \
    void __tsan_unaligned_write##SIZE(void* p) {                                               \
        if (current) access(current, p, SIZE, ACCESS_STORE, CALLER, false);                    \
    }
HOOK(1) HOOK(2) HOOK(4) HOOK(8) HOOK(16)

void __tsan_read_range(void* p, unsigned long size) {
    if (current) access(current, p, size, ACCESS_LOAD, CALLER, false);
}
void __tsan_write_range(void* p, unsigned long size) {
    if (current) access(current, p, size, ACCESS_STORE, CALLER, false);
}
void __tsan_volatile_read4(void* p) { if (current) access(current, p, 4, ACCESS_LOAD, CALLER); }
void __tsan_vptr_update(void*, void*) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
}
