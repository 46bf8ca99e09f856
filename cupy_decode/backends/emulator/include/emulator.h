#pragma once
// What the CPU twins of CUDA ask of the runtime (runtime.cpp). Only this header is seen by both.
//
// The kernel is compiled with -fsanitize=thread, whose hooks (__tsan_read4, ...) the runtime
// defines: that is how it sees every access before it happens. Whatever a twin does with memory of
// the kernel therefore goes through a function below; values travel in registers, not by pointer.
#include <cstdint>

struct EmuIndex {
    unsigned x, y, z;
};
struct EmuWords {
    uint32_t w[4];
};
struct EmuFloats {
    float f[4];
};

enum EmuBarrier { EMU_SYNC, EMU_SYNC_COUNT, EMU_SYNC_AND, EMU_SYNC_OR };
enum EmuReduce { EMU_ADD, EMU_MIN, EMU_MAX, EMU_UMIN, EMU_UMAX, EMU_AND, EMU_OR, EMU_XOR };
enum EmuElement { EMU_F16, EMU_BF16 };

extern "C" {
// Constant for the life of a fibre, so the compiler may keep the answers.
EmuIndex emu_thread_idx() __attribute__((const));
EmuIndex emu_block_idx() __attribute__((const));
EmuIndex emu_block_dim() __attribute__((const));
EmuIndex emu_grid_dim() __attribute__((const));
int emu_lane() __attribute__((const));
unsigned char* emu_dynamic_shared() __attribute__((const));

int emu_block_barrier(EmuBarrier kind, int predicate, const char* file, int line);
// A thread comes to a barrier of `threads` threads, and waits for the others or goes on.
void emu_named_barrier(int barrier, int threads, int waits, const char* file, int line);
void emu_warp_sync(unsigned mask, const char* file, int line);
uint64_t emu_shuffle(unsigned mask, uint64_t value, int source, const char* file, int line);
unsigned emu_ballot(unsigned mask, int predicate, const char* file, int line);
uint32_t emu_reduce(unsigned mask, EmuReduce op, uint32_t value, const char* file, int line);
EmuFloats emu_mma_m16n8k16(EmuFloats d, EmuWords a, EmuWords b, EmuElement type, const char* file,
                           int line);
EmuWords emu_ldmatrix(const void* row, int matrices, bool transpose, const char* file, int line);
uint32_t emu_movmatrix(uint32_t value, const char* file, int line);

// A read-modify-write is one atomic access: no fibre runs between the two calls.
uint64_t emu_atomic_begin(const void* p, unsigned size);
void emu_atomic_end(void* p, unsigned size, uint64_t value);

EmuWords emu_load_16(const void* p);   // global, 16-byte aligned
// Asynchronous copy to shared memory of `bytes` and zeros up to 16; it arrives at the wait.
void emu_cp_async_16(void* shared, const void* global, int bytes);
void emu_cp_async_commit();
void emu_cp_async_wait(int groups_left);
// Wait for the launch before, which is over as soon as somebody asks; let the one behind start.
void emu_grid_wait();
void emu_launch_dependents(const char* file, int line);
void emu_trap(const char* what, const char* file, int line);
}
