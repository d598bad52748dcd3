// Compression of gradients on a device, and adding what was compressed.
//
// Owns: the same values, bit for bit, as reference.rs. Does not own: how many chunks there are, and when a result is fetched
// (mod.rs and launch.rs).
//
// A sparse tensor: sample, threshold, count (per tile, and whether all is finite), scan (where each tile's output begins), fill.
// The order of the output does not depend on the order in which blocks run: every tile knows its place before one is filled.
// Nothing is changed before count has looked at everything: fill and int8 do nothing where status says that it may not be.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// Elements per warp in count and fill, as in launch.rs.
#define TILE 1024u
// Elements that a lane loads before it uses them, so that loads overlap. TILE is a multiple of 32 * AHEAD.
#define AHEAD 8u
// Tables of counts in threshold.
#define COPIES 8u
#define NONE 0xffffffffffffffffull
#define INFINITY_BITS 0x7f800000u
#define F16_MAX 65504.0f
#define QUANTISED_MAX 127.0f
#define ALL_LANES 0xffffffffu

// As in launch.rs. The first two are the least index, or NONE.
struct Status {
    u64 not_finite;
    u64 bad_sum;
    u64 kept;
    u64 capacity;
    u64 threshold;
};

// A tensor, as in launch.rs: f32 (kind 0), bfloat16 (1) or binary16 (2); residual may be null.
struct Tensor {
    const void *values;
    float *residual;
    u64 len;
    u64 kind;
};

static __device__ __forceinline__ u32 magnitude(float value) { return __float_as_uint(value) & 0x7fffffffu; }

static __device__ __forceinline__ float from_f16(u32 bits) {
    u32 magnitude = bits & 0x7fffu;
    // 2^112 corrects the exponent's bias, and makes subnormals normal.
    u32 finite = __float_as_uint(__fmul_rn(__uint_as_float(magnitude << 13), __uint_as_float(0x77800000u)));
    u32 not_finite = (magnitude << 13) | INFINITY_BITS;
    return __uint_as_float((magnitude >= 0x7c00u ? not_finite : finite) | ((bits & 0x8000u) << 16));
}

// To nearest, ties to even, within the finite range. Only for finite values.
static __device__ __forceinline__ u16 to_f16(float value) {
    u16 bits;
    float within = fminf(fmaxf(value, -F16_MAX), F16_MAX);
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(within));
    return bits;
}

static __device__ __forceinline__ float load(const Tensor &of, u64 index) {
    if (of.kind == 0) {
        return ((const float *)of.values)[index];
    }
    u32 bits = ((const u16 *)of.values)[index];
    return of.kind == 1 ? __uint_as_float(bits << 16) : from_f16(bits);
}

static __device__ __forceinline__ float with_residual(const Tensor &of, u64 index, float value) {
    return of.residual == 0 ? value : __fadd_rn(value, of.residual[index]);
}

static __device__ __forceinline__ bool refused(const Status *status) {
    return status->not_finite != NONE || status->bad_sum != NONE || status->kept > status->capacity;
}

// The magnitudes of the sample: one thread per stratum, as sample.rs has it.
extern "C" __global__ void sample(Tensor of, u64 stride, u32 count, u64 seed, u32 *magnitudes) {
    u32 stratum = blockIdx.x * blockDim.x + threadIdx.x;
    if (stratum >= count) {
        return;
    }
    u64 begin = stratum * stride;
    u64 elements = of.len - begin < stride ? of.len - begin : stride;
    u64 random = seed + ((u64)stratum + 1) * 0x9e3779b97f4a7c15ull;
    random = (random ^ (random >> 30)) * 0xbf58476d1ce4e5b9ull;
    random = (random ^ (random >> 27)) * 0x94d049bb133111ebull;
    random ^= random >> 31;
    u64 place = begin + __umul64hi(random, elements);
    magnitudes[stratum] = magnitude(with_residual(of, place, load(of, place)));
}

// The magnitude at `rank` from below, from 0 to count - 1, and at least `least`: one block of 1024 threads, a byte of the answer
// per round. Warps count apart, some together: most magnitudes have one of few exponents, and would wait for each other.
extern "C" __global__ void threshold(const u32 *magnitudes, u32 count, u32 rank, u32 least, Status *status) {
    __shared__ u32 of_byte[COPIES][256];
    __shared__ u32 prefix, left;
    u32 lane = threadIdx.x % 32, copy = threadIdx.x / 32 % COPIES;
    if (threadIdx.x == 0) {
        prefix = 0;
        left = rank;
    }
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (u32 i = threadIdx.x; i < COPIES * 256; i += blockDim.x) {
            of_byte[i / 256][i % 256] = 0;
        }
        __syncthreads();
        for (u32 i = threadIdx.x; i < count; i += blockDim.x) {
            u32 bits = magnitudes[i];
            // 64 bits: in the first round everything is shifted out.
            if ((u64)bits >> (shift + 8) == (u64)prefix >> (shift + 8)) {
                atomicAdd(&of_byte[copy][(bits >> shift) & 255u], 1u);
            }
        }
        __syncthreads();
        for (u32 byte = threadIdx.x; byte < 256; byte += blockDim.x) {
            u32 sum = 0;
            for (u32 of = 0; of < COPIES; of += 1) {
                sum += of_byte[of][byte];
            }
            of_byte[0][byte] = sum;
        }
        __syncthreads();
        // One warp looks for the byte, each lane among eight.
        if (threadIdx.x < 32) {
            u32 own = 0;
            for (u32 byte = 8 * lane; byte < 8 * lane + 8; byte += 1) {
                own += of_byte[0][byte];
            }
            u32 until = own;
            for (u32 step = 1; step < 32; step *= 2) {
                u32 before = __shfl_up_sync(ALL_LANES, until, step);
                until += lane >= step ? before : 0;
            }
            u32 rest = left;
            // All lanes have read it; one of them writes it.
            __syncwarp();
            if (until > rest && until - own <= rest) {
                rest -= until - own;
                u32 byte = 8 * lane;
                while (rest >= of_byte[0][byte]) {
                    rest -= of_byte[0][byte];
                    byte += 1;
                }
                left = rest;
                prefix |= byte << shift;
            }
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        status->threshold = prefix > least ? prefix : least;
    }
}

// How many elements of each tile are kept, and whether all are finite: one warp per tile of one chunk. `counts` has `tiles`.
extern "C" __global__ void count(Tensor of, u64 begin, u32 elements, u32 tiles, u64 *counts, Status *status) {
    u32 tile = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    u32 lane = threadIdx.x % 32;
    // The same for all of a warp.
    if (tile >= tiles) {
        return;
    }
    u32 least = (u32)status->threshold;
    u32 from = tile * TILE;
    u32 to = elements - from < TILE ? elements : from + TILE;
    u32 kept = 0;
    u64 not_finite = NONE, bad_sum = NONE;
#pragma unroll 8
    for (u32 i = from + lane; i < to; i += 32) {
        u64 index = begin + i;
        float value = load(of, index);
        float sum = with_residual(of, index, value);
        if (magnitude(value) >= INFINITY_BITS && not_finite == NONE) {
            not_finite = index;
        }
        if (magnitude(sum) >= INFINITY_BITS && bad_sum == NONE) {
            bad_sum = index;
        }
        kept += magnitude(sum) >= least ? 1 : 0;
    }
    for (u32 step = 16; step > 0; step /= 2) {
        kept += __shfl_xor_sync(ALL_LANES, kept, step);
    }
    if (lane == 0) {
        counts[tile] = kept;
    }
    if (not_finite != NONE) {
        atomicMin(&status->not_finite, not_finite);
    }
    if (bad_sum != NONE) {
        atomicMin(&status->bad_sum, bad_sum);
    }
}

// Counts of one chunk become the places where output begins, after the chunks before: one block of 1024 threads, whose warps
// have ranges of their own, side by side for each load.
extern "C" __global__ void scan(u64 *counts, u32 tiles, u64 *chunk_end, Status *status) {
    __shared__ u64 sums[32];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    u32 each = (tiles + warps - 1) / warps;
    u32 from = warp * each < tiles ? warp * each : tiles;
    u32 to = tiles - from < each ? tiles : from + each;
    u64 sum = 0;
#pragma unroll 8
    for (u32 i = from + lane; i < to; i += 32) {
        sum += counts[i];
    }
    for (u32 step = 16; step > 0; step /= 2) {
        sum += __shfl_xor_sync(ALL_LANES, sum, step);
    }
    if (lane == 0) {
        sums[warp] = sum;
    }
    u64 at = status->kept;
    // All threads have read where the chunk begins, and all sums are there.
    __syncthreads();
    for (u32 before = 0; before < warp; before += 1) {
        at += sums[before];
    }
    for (u32 row = from; row < to; row += 32 * AHEAD) {
        u64 tile[AHEAD];
#pragma unroll
        for (u32 ahead = 0; ahead < AHEAD; ahead += 1) {
            u32 i = row + 32 * ahead + lane;
            tile[ahead] = i < to ? counts[i] : 0;
        }
#pragma unroll
        for (u32 ahead = 0; ahead < AHEAD; ahead += 1) {
            u32 i = row + 32 * ahead + lane;
            u64 until = tile[ahead];
            for (u32 step = 1; step < 32; step *= 2) {
                u64 left = __shfl_up_sync(ALL_LANES, until, step);
                until += lane >= step ? left : 0;
            }
            if (i < to) {
                counts[i] = at + until - tile[ahead];
            }
            at += __shfl_sync(ALL_LANES, until, 31);
        }
    }
    // The last warp's range ends last, also where it has none.
    if (threadIdx.x == blockDim.x - 1) {
        status->kept = at;
        *chunk_end = at;
    }
}

// Writes what is kept, in order, and the residual: one warp per tile of one chunk. Each element is one lane's alone.
extern "C" __global__ void fill(Tensor of, u64 begin, u32 elements, u32 tiles, const u64 *places, int *indices, u16 *halves,
                                const Status *status) {
    u32 tile = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    u32 lane = threadIdx.x % 32;
    // The same for all of a warp.
    if (tile >= tiles || refused(status)) {
        return;
    }
    u32 least = (u32)status->threshold;
    u32 from = tile * TILE;
    u32 to = elements - from < TILE ? elements : from + TILE;
    u64 place = places[tile];
    for (u32 row = from; row < to; row += 32 * AHEAD) {
        float sums[AHEAD];
#pragma unroll
        for (u32 ahead = 0; ahead < AHEAD; ahead += 1) {
            u32 i = row + 32 * ahead + lane;
            sums[ahead] = i < to ? with_residual(of, begin + i, load(of, begin + i)) : 0.0f;
        }
#pragma unroll
        for (u32 ahead = 0; ahead < AHEAD; ahead += 1) {
            u32 i = row + 32 * ahead + lane;
            float sum = sums[ahead];
            // Beyond the end there is a zero, which is below every threshold.
            bool keep = magnitude(sum) >= least;
            u32 of_warp = __ballot_sync(ALL_LANES, keep);
            if (keep) {
                u64 at = place + __popc(of_warp & ((1u << lane) - 1));
                u16 half = to_f16(sum);
                indices[at] = (int)i;
                halves[at] = half;
                sum = __fsub_rn(sum, from_f16(half));
            }
            if (of.residual != 0 && i < to) {
                of.residual[begin + i] = sum;
            }
            place += __popc(of_warp);
        }
    }
}

// Whether all are finite, before int8.
extern "C" __global__ void check(Tensor of, Status *status) {
    u64 not_finite = NONE, bad_sum = NONE;
    u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 index = (u64)blockIdx.x * blockDim.x + threadIdx.x; index < of.len; index += step) {
        float value = load(of, index);
        float sum = with_residual(of, index, value);
        if (magnitude(value) >= INFINITY_BITS && not_finite == NONE) {
            not_finite = index;
        }
        if (magnitude(sum) >= INFINITY_BITS && bad_sum == NONE) {
            bad_sum = index;
        }
    }
    if (not_finite != NONE) {
        atomicMin(&status->not_finite, not_finite);
    }
    if (bad_sum != NONE) {
        atomicMin(&status->bad_sum, bad_sum);
    }
}

// Blocks of 8 bits, and the residual: one block of threads per block of elements at a time, whole warps, at most 1024 threads.
extern "C" __global__ void int8(Tensor of, u32 block, float scale_max, signed char *quantised, float *scales,
                                const Status *status) {
    __shared__ u32 of_warps[32];
    if (refused(status)) {
        return;
    }
    u64 blocks = (of.len + block - 1) / block;
    for (u64 number = blockIdx.x; number < blocks; number += gridDim.x) {
        u64 begin = number * block;
        u32 elements = of.len - begin < block ? (u32)(of.len - begin) : block;
        u32 largest = 0;
        for (u32 i = threadIdx.x; i < elements; i += blockDim.x) {
            u32 found = magnitude(with_residual(of, begin + i, load(of, begin + i)));
            largest = found > largest ? found : largest;
        }
        for (u32 step = 16; step > 0; step /= 2) {
            u32 other = __shfl_xor_sync(ALL_LANES, largest, step);
            largest = other > largest ? other : largest;
        }
        if (threadIdx.x % 32 == 0) {
            of_warps[threadIdx.x / 32] = largest;
        }
        __syncthreads();
        for (u32 warp = 0; warp < blockDim.x / 32; warp += 1) {
            largest = of_warps[warp] > largest ? of_warps[warp] : largest;
        }
        // Before the next block's are written.
        __syncthreads();
        float scale = fminf(__fdiv_rn(__uint_as_float(largest), QUANTISED_MAX), scale_max);
        if (threadIdx.x == 0) {
            scales[number] = scale;
        }
        // A thread writes what it alone read.
        for (u32 i = threadIdx.x; i < elements; i += blockDim.x) {
            float sum = with_residual(of, begin + i, load(of, begin + i));
            int value = 0;
            if (scale != 0.0f) {
                value = __float2int_rn(fminf(fmaxf(__fdiv_rn(sum, scale), -QUANTISED_MAX), QUANTISED_MAX));
            }
            quantised[begin + i] = (signed char)value;
            if (of.residual != 0) {
                of.residual[begin + i] = __fsub_rn(sum, __fmul_rn((float)value, scale));
            }
        }
    }
}

// dense += scale * value, for a chunk of `elements` elements whose indices ascend. Others are left out: no other memory is
// written.
extern "C" __global__ void add_sparse(float *dense, u32 elements, const int *indices, const u16 *halves, u64 entries, float scale) {
    u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 entry = (u64)blockIdx.x * blockDim.x + threadIdx.x; entry < entries; entry += step) {
        int index = indices[entry];
        bool ascends = entry == 0 || indices[entry - 1] < index;
        if (ascends && index >= 0 && (u32)index < elements) {
            dense[index] = __fadd_rn(dense[index], __fmul_rn(scale, from_f16(halves[entry])));
        }
    }
}

// dense += scale * (value * its block's scale).
extern "C" __global__ void add_int8(float *dense, u64 len, u32 block, const signed char *quantised, const float *scales,
                                    float scale) {
    u64 blocks = (len + block - 1) / block;
    for (u64 number = blockIdx.x; number < blocks; number += gridDim.x) {
        u64 begin = number * block;
        u32 elements = len - begin < block ? (u32)(len - begin) : block;
        float of_block = scales[number];
        for (u32 i = threadIdx.x; i < elements; i += blockDim.x) {
            float value = __fmul_rn((float)quantised[begin + i], of_block);
            dense[begin + i] = __fadd_rn(dense[begin + i], __fmul_rn(scale, value));
        }
    }
}
