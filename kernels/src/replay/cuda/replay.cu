// Adam and AdamW over a flat range, many steps in one pass.
//
// Owns: the arithmetic on a device. It is the reference's, operation by operation: each intrinsic below is rounded to nearest
// by itself, and the compiler contracts none of them. Does not own: checks and address arithmetic (mod.rs), which have
// promised: every address is aligned for its type, and `elements` elements lie behind each of them.
//
// A block of 256 threads takes a tile of 1,024 elements at a time, each thread four of them, and keeps weight and moments in
// registers from the first step to the last. A sparse gradient is scattered into the tile in shared memory; where a tile's
// entries begin was searched before, by `offsets`.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

enum { THREADS = 256, EACH = 4, TILE = THREADS * EACH };
enum { F32 = 0, BF16 = 1, F16 = 2, SPARSE = 3, INT8 = 4 };
enum { NO_COPY = 0, COPY_BF16 = 1, COPY_F16 = 2 };
enum { NO_SHIFT = 0xffffffffu };

// As StepArgs in args.rs.
struct Step {
    u64 values;         // of this launch's first element; sparse: of the chunk's first entry
    u64 beside;         // INT8: the scales, from the gradient's first; sparse: the chunk's indices
    u64 table;          // sparse: u32, one per tile and one more: the first entry at or after the tile's first element
    u64 first;          // this launch's first element, within the gradient (INT8) or within the chunk (sparse)
    u64 size;           // INT8: elements per block; sparse: entries of the chunk
    u32 shift;          // INT8: log2 of `size`, or NO_SHIFT
    u32 kind;
    u32 from_gradient;
    float gradient, shrink, coupled, mix, beta2, fresh2, correction, eps, stride;
};

static __device__ __forceinline__ float from_f16(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

static __device__ __forceinline__ float from_bf16(u16 bits) { return __uint_as_float((u32)bits << 16); }

static __device__ __forceinline__ u16 to_f16(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// To nearest, ties to even; a NaN keeps its upper bits and becomes quiet, so that no carry makes it infinite.
static __device__ __forceinline__ u16 to_bf16(float value) {
    u32 bits = __float_as_uint(value);
    u32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (u16)(value != value ? ((bits >> 16) | 0x40u) : rounded);
}

static __device__ __forceinline__ float scale_of(const Step &step, u64 at) {
    u64 block = step.shift == NO_SHIFT ? at / step.size : at >> step.shift;
    return ((const float *)step.beside)[block];
}

static __device__ __forceinline__ void update(
    const Step &step, float &weight, float &exp_avg, float &exp_avg_sq, float gradient
) {
    gradient = __fmul_rn(gradient, step.gradient);
    weight = __fmul_rn(weight, step.shrink);
    if (step.coupled != 0.0f) gradient = __fadd_rn(gradient, __fmul_rn(step.coupled, weight));
    float nearer = step.from_gradient ? gradient : exp_avg;
    exp_avg = __fadd_rn(nearer, __fmul_rn(step.mix, __fsub_rn(gradient, exp_avg)));
    exp_avg_sq = __fadd_rn(__fmul_rn(exp_avg_sq, step.beta2), __fmul_rn(__fmul_rn(step.fresh2, gradient), gradient));
    float denominator = __fadd_rn(__fmul_rn(__fsqrt_rn(exp_avg_sq), step.correction), step.eps);
    weight = __fadd_rn(weight, __fdiv_rn(__fmul_rn(step.stride, exp_avg), denominator));
}

// Where this thread's `each`th element is in its tile: four side by side, or, where addresses do not allow loads of four,
// those that neighbours' loads are beside.
template <bool WIDE> static __device__ __forceinline__ u32 place(u32 each) {
    return WIDE ? threadIdx.x * EACH + each : threadIdx.x + each * THREADS;
}

// All four elements are there and lie side by side.
template <bool WIDE> static __device__ __forceinline__ bool four(u32 here) {
    return WIDE && threadIdx.x * EACH + EACH <= here;
}

template <bool WIDE> static __device__ __forceinline__ void load(const float *from, u32 here, float *out) {
    if (four<WIDE>(here)) {
        float4 all = ((const float4 *)from)[threadIdx.x];
        out[0] = all.x; out[1] = all.y; out[2] = all.z; out[3] = all.w;
    } else {
        for (u32 each = 0; each < EACH; each++) {
            u32 at = place<WIDE>(each);
            out[each] = at < here ? from[at] : 0.0f;
        }
    }
}

template <bool WIDE> static __device__ __forceinline__ void store(float *to, u32 here, const float *from) {
    if (four<WIDE>(here)) {
        ((float4 *)to)[threadIdx.x] = make_float4(from[0], from[1], from[2], from[3]);
    } else {
        for (u32 each = 0; each < EACH; each++) {
            u32 at = place<WIDE>(each);
            if (at < here) to[at] = from[each];
        }
    }
}

template <bool WIDE> static __device__ __forceinline__ void load16(const u16 *from, u32 here, u32 kind, float *out) {
    u16 bits[EACH];
    if (four<WIDE>(here)) {
        ushort4 all = ((const ushort4 *)from)[threadIdx.x];
        bits[0] = all.x; bits[1] = all.y; bits[2] = all.z; bits[3] = all.w;
    } else {
        for (u32 each = 0; each < EACH; each++) {
            u32 at = place<WIDE>(each);
            bits[each] = at < here ? from[at] : (u16)0;
        }
    }
    for (u32 each = 0; each < EACH; each++) out[each] = kind == BF16 ? from_bf16(bits[each]) : from_f16(bits[each]);
}

template <bool WIDE> static __device__ __forceinline__ void store16(u16 *to, u32 here, u32 kind, const float *from) {
    u16 bits[EACH];
    for (u32 each = 0; each < EACH; each++) bits[each] = kind == COPY_BF16 ? to_bf16(from[each]) : to_f16(from[each]);
    if (four<WIDE>(here)) {
        ((ushort4 *)to)[threadIdx.x] = make_ushort4(bits[0], bits[1], bits[2], bits[3]);
    } else {
        for (u32 each = 0; each < EACH; each++) {
            u32 at = place<WIDE>(each);
            if (at < here) to[at] = bits[each];
        }
    }
}

template <bool WIDE> static __device__ __forceinline__ void load8(const Step &step, u32 base, u32 here, float *out) {
    const signed char *from = (const signed char *)step.values + base;
    signed char value[EACH];
    if (four<WIDE>(here)) {
        char4 all = ((const char4 *)from)[threadIdx.x];
        value[0] = all.x; value[1] = all.y; value[2] = all.z; value[3] = all.w;
    } else {
        for (u32 each = 0; each < EACH; each++) {
            u32 at = place<WIDE>(each);
            value[each] = at < here ? from[at] : (signed char)0;
        }
    }
    for (u32 each = 0; each < EACH; each++) {
        u32 at = place<WIDE>(each);
        // Scales beyond the range's last element are not there.
        out[each] = at < here ? __fmul_rn((float)value[each], scale_of(step, step.first + base + at)) : 0.0f;
    }
}

template <bool WIDE>
static __device__ __forceinline__ void replay(
    float *weights, float *exp_avgs, float *exp_avg_sqs, u16 *copy, u32 copy_kind, const Step *steps, u32 count, u32 elements
) {
    __shared__ float scattered[TILE];
    u32 tiles = (elements + TILE - 1) / TILE;
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        u32 base = tile * TILE;
        u32 here = elements - base < TILE ? elements - base : TILE;
        float weight[EACH], exp_avg[EACH], exp_avg_sq[EACH], gradient[EACH];
        load<WIDE>(weights + base, here, weight);
        load<WIDE>(exp_avgs + base, here, exp_avg);
        load<WIDE>(exp_avg_sqs + base, here, exp_avg_sq);
        for (u32 at_step = 0; at_step < count; at_step++) {
            const Step step = steps[at_step];
            // The same branch for every thread of the block: its barriers meet.
            if (step.kind == SPARSE) {
                const u32 *table = (const u32 *)step.table;
                const int *indices = (const int *)step.beside;
                const u16 *values = (const u16 *)step.values;
                __syncthreads(); // what the step or tile before scattered has been read
                for (u32 each = 0; each < EACH; each++) scattered[threadIdx.x + each * THREADS] = 0.0f;
                __syncthreads();
                u32 end = table[tile + 1];
                for (u64 entry = (u64)table[tile] + threadIdx.x; entry < end; entry += THREADS) {
                    // Below 0 wraps to far beyond the tile: an index of another tile is never stored.
                    u32 at = (u32)indices[entry] - (u32)step.first - base;
                    if (at < TILE) scattered[at] = from_f16(values[entry]);
                }
                __syncthreads();
                for (u32 each = 0; each < EACH; each++) gradient[each] = scattered[place<WIDE>(each)];
            } else if (step.kind == F32) {
                load<WIDE>((const float *)step.values + base, here, gradient);
            } else if (step.kind == INT8) {
                load8<WIDE>(step, base, here, gradient);
            } else {
                load16<WIDE>((const u16 *)step.values + base, here, step.kind, gradient);
            }
            for (u32 each = 0; each < EACH; each++) {
                update(step, weight[each], exp_avg[each], exp_avg_sq[each], gradient[each]);
            }
        }
        store<WIDE>(weights + base, here, weight);
        store<WIDE>(exp_avgs + base, here, exp_avg);
        store<WIDE>(exp_avg_sqs + base, here, exp_avg_sq);
        if (copy_kind != NO_COPY) store16<WIDE>(copy + base, here, copy_kind, weight);
    }
}

// State and dense gradients at addresses for loads of four.
extern "C" __global__ void __launch_bounds__(THREADS) replay_wide(
    u64 weights, u64 exp_avg, u64 exp_avg_sq, u64 copy, u32 copy_kind, u64 steps, u32 count, u32 elements
) {
    replay<true>(
        (float *)weights, (float *)exp_avg, (float *)exp_avg_sq, (u16 *)copy, copy_kind, (const Step *)steps, count, elements
    );
}

// Any addresses that are aligned for one element.
extern "C" __global__ void __launch_bounds__(THREADS) replay_narrow(
    u64 weights, u64 exp_avg, u64 exp_avg_sq, u64 copy, u32 copy_kind, u64 steps, u32 count, u32 elements
) {
    replay<false>(
        (float *)weights, (float *)exp_avg, (float *)exp_avg_sq, (u16 *)copy, copy_kind, (const Step *)steps, count, elements
    );
}

// Fills the tables of all sparse steps: blockIdx.y is the step, and each thread searches one tile's beginning.
extern "C" __global__ void __launch_bounds__(THREADS) offsets(u64 all_steps, u32 elements) {
    const Step step = ((const Step *)all_steps)[blockIdx.y];
    u32 tiles = (elements + TILE - 1) / TILE;
    u32 tile = blockIdx.x * THREADS + threadIdx.x;
    if (step.kind != SPARSE || tile > tiles) return;
    u64 within = (u64)tile * TILE < elements ? (u64)tile * TILE : elements;
    u64 target = step.first + within; // at most 2^31
    const int *indices = (const int *)step.beside;
    u64 low = 0, high = step.size;
    while (low < high) {
        u64 middle = low + (high - low) / 2;
        if ((u64)(u32)indices[middle] < target) low = middle + 1; else high = middle;
    }
    ((u32 *)step.table)[tile] = (u32)low;
}
