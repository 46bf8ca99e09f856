#pragma once
// CPU twins of the PTX wrappers in kernels_cu/ptx.cuh: same names, same contracts.
#define DYN_SMEM(name) unsigned char* name = emu_dynamic_shared()

inline float ex2(float x) {
    const float y = std::exp2(x);
    return y < 1.17549435e-38f ? 0.0f : y;   // .ftz: a NaN compares false and stays
}

inline uint4 emu_to_uint4(EmuWords v) { return make_uint4(v.w[0], v.w[1], v.w[2], v.w[3]); }

inline uint4 load_16(const void* p) { return emu_to_uint4(emu_load_16(p)); }

inline void prefetch_l2(const void*) {}

// ---- asynchronous copies

// 16 zeros where `there` is false.
inline void cp_async_16_or_zero(void* shared, const void* global, bool there) {
    emu_cp_async_16(shared, global, there ? 16 : 0);
}
inline void cp_async_commit() { emu_cp_async_commit(); }
template <int N>
inline void cp_async_wait() {
    emu_cp_async_wait(N);
}

// ---- matrix fragments

inline void ldmatrix_x4(unsigned int (&r)[4], const void* row, EMU_SITE) {
    const EmuWords v = emu_ldmatrix(row, 4, false, file, line);
    r[0] = v.w[0], r[1] = v.w[1], r[2] = v.w[2], r[3] = v.w[3];
}
inline void ldmatrix_x4_trans(unsigned int (&r)[4], const void* row, EMU_SITE) {
    const EmuWords v = emu_ldmatrix(row, 4, true, file, line);
    r[0] = v.w[0], r[1] = v.w[1], r[2] = v.w[2], r[3] = v.w[3];
}
inline unsigned int movmatrix_trans(unsigned int x, EMU_SITE) {
    return emu_movmatrix(x, file, line);
}

inline EmuElement emu_element(__half) { return EMU_F16; }
inline EmuElement emu_element(__nv_bfloat16) { return EMU_BF16; }

template <typename T>
inline void mma_m16n8k16(float (&d)[4], const unsigned int (&a)[4], const unsigned int (&b)[2],
                         T tag, EMU_SITE) {
    const EmuFloats r = emu_mma_m16n8k16({d[0], d[1], d[2], d[3]}, {a[0], a[1], a[2], a[3]},
                                         {b[0], b[1], 0, 0}, emu_element(tag), file, line);
    d[0] = r.f[0], d[1] = r.f[1], d[2] = r.f[2], d[3] = r.f[3];
}

// ---- named barriers of a block

inline void bar_sync(int barrier, int threads, EMU_SITE) {
    emu_named_barrier(barrier, threads, 1, file, line);
}
inline void bar_arrive(int barrier, int threads, EMU_SITE) {
    emu_named_barrier(barrier, threads, 0, file, line);
}

// ---- between launches

inline void griddepcontrol_wait() { emu_grid_wait(); }
inline void griddepcontrol_launch_dependents(EMU_SITE) { emu_launch_dependents(file, line); }

// ---- between blocks

inline unsigned int atom_inc_acq_rel(unsigned int* p, unsigned int limit) {
    return atomicInc(p, limit);
}
inline unsigned int atom_inc(unsigned int* p, unsigned int limit) { return atomicInc(p, limit); }
