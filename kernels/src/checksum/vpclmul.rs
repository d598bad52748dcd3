//! CRC-64/NVME by folding with 256-bit carry-less multiplication (AVX2 and VPCLMULQDQ).
//!
//! Owns: the one loop that this crate writes with processor instructions; unsafe code is allowed here. Does not
//! own: the choice to use it (`backend`), or its constants (`field`).
//!
//! Method: Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction" (Intel, 2009). The
//! message is held as a few running blocks. Two carry-less multiplications move a block over the next bytes, and the
//! block is XORed with them. At the end the blocks are joined into one of 128 bits with the message's remainder, and
//! the table finishes it like any other 16 bytes.

use super::field::fold_over;
use super::table;
use std::arch::x86_64::{
    __m128i, __m256i, _MM_HINT_T0, _mm_clmulepi64_si128, _mm_extract_epi64, _mm_prefetch, _mm_set_epi64x,
    _mm_xor_si128, _mm256_broadcastsi128_si256, _mm256_castsi256_si128, _mm256_clmulepi64_epi128,
    _mm256_extracti128_si256, _mm256_xor_si256, _mm256_zextsi128_si256,
};
use std::mem;

/// Width of a register.
const LANE_BYTES: usize = 32;
/// Registers that run side by side. A multiplication takes 4 cycles, and one can start every cycle or two. Eight
/// registers with two multiplications each keep the unit busy, and leave eight of the sixteen registers for the
/// multipliers and pending values.
const LANES: usize = 8;
/// How far ahead of the loop memory is prefetched. The processor's own prefetch stops at each 4 KiB page; this prefetch
/// crosses the boundary, and hides the wait for the first lines of the next page.
const PREFETCH_BYTES: usize = 4096;
const CACHE_LINE_BYTES: usize = 64;

/// Multipliers over `LANES` registers, over one, and over half of one.
const OVER_STRIDE: [u64; 2] = fold_over(256);
const OVER_LANE: [u64; 2] = fold_over(32);
const OVER_HALF_LANE: [u64; 2] = fold_over(16);

/// Returns whether this processor, and the operating system on it, run this module's instructions.
pub(super) fn is_available() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("vpclmulqdq")
        && is_x86_feature_detected!("pclmulqdq")
        && is_x86_feature_detected!("sse4.1")
}

/// Appends `bytes` to a raw register.
///
/// # Panics
/// When the instructions are missing: a wrong choice of back end is an error of this crate.
pub(super) fn extend(register: u64, bytes: &[u8]) -> u64 {
    assert!(is_available(), "this processor has no VPCLMULQDQ: use another back end");
    // SAFETY: the assertion above found every feature that `fold` is compiled for.
    unsafe { fold(register, bytes) }
}

#[target_feature(enable = "avx2,vpclmulqdq,pclmulqdq,sse4.1")]
fn fold(register: u64, bytes: &[u8]) -> u64 {
    let (lanes, tail) = bytes.as_chunks::<LANE_BYTES>();
    let (strides, single_lanes) = lanes.as_chunks::<LANES>();
    // The register is XORed into the first eight bytes, which is its place when they are shifted in.
    let entering = _mm256_zextsi128_si256(_mm_set_epi64x(0, register.cast_signed()));

    let (mut block, rest) = match (strides, single_lanes) {
        ([first, strides @ ..], rest) => {
            let mut running: [__m256i; LANES] = std::array::from_fn(|lane| load(&first[lane]));
            running[0] = _mm256_xor_si256(running[0], entering);
            let multipliers = multipliers(OVER_STRIDE);
            for stride in strides {
                prefetch(stride);
                for (block, next) in running.iter_mut().zip(stride) {
                    *block = advance(*block, multipliers, load(next));
                }
            }
            let multipliers = self::multipliers(OVER_LANE);
            let [first, others @ ..] = running;
            (others.into_iter().fold(first, |block, next| advance(block, multipliers, next)), rest)
        }
        ([], [first, rest @ ..]) => (_mm256_xor_si256(load(first), entering), rest),
        ([], []) => return table::extend(register, tail),
    };
    let multipliers = multipliers(OVER_LANE);
    for next in rest {
        block = advance(block, multipliers, load(next));
    }
    let block = join_halves(block);
    let remainder = table::extend(0, &block);
    table::extend(remainder, tail)
}

/// Returns the two multipliers, in each half of a register.
#[target_feature(enable = "avx2")]
fn multipliers([first, last]: [u64; 2]) -> __m256i {
    _mm256_broadcastsi128_si256(_mm_set_epi64x(last.cast_signed(), first.cast_signed()))
}

/// Moves both halves of `block` over the multipliers' distance and adds `next`.
#[target_feature(enable = "avx2,vpclmulqdq")]
fn advance(block: __m256i, multipliers: __m256i, next: __m256i) -> __m256i {
    let first = _mm256_clmulepi64_epi128::<0x00>(block, multipliers);
    let last = _mm256_clmulepi64_epi128::<0x11>(block, multipliers);
    _mm256_xor_si256(_mm256_xor_si256(first, last), next)
}

/// Moves the first half over the second: 16 bytes that leave the same remainder as the 32.
#[target_feature(enable = "avx2,pclmulqdq,sse4.1")]
fn join_halves(block: __m256i) -> [u8; 16] {
    let [first, last] = OVER_HALF_LANE;
    let multipliers = _mm_set_epi64x(last.cast_signed(), first.cast_signed());
    let half = _mm256_castsi256_si128(block);
    let first = _mm_clmulepi64_si128::<0x00>(half, multipliers);
    let last = _mm_clmulepi64_si128::<0x11>(half, multipliers);
    let joined: __m128i = _mm_xor_si128(_mm_xor_si128(first, last), _mm256_extracti128_si256::<1>(block));
    let low = _mm_extract_epi64::<0>(joined).to_le_bytes();
    let high = _mm_extract_epi64::<1>(joined).to_le_bytes();
    std::array::from_fn(|at| if at < 8 { low[at] } else { high[at - 8] })
}

/// Prefetches the cache lines that are due in `PREFETCH_BYTES`.
#[target_feature(enable = "sse")]
fn prefetch(stride: &[[u8; LANE_BYTES]; LANES]) {
    let ahead = stride.as_ptr().cast::<i8>().wrapping_add(PREFETCH_BYTES);
    for line in 0..size_of_val(stride) / CACHE_LINE_BYTES {
        // A hint never faults, so the address need not be valid.
        _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(line * CACHE_LINE_BYTES));
    }
}

/// Copies by value: the pointer intrinsics check their arguments in builds with debug assertions, which costs two
/// thirds of the speed there.
#[target_feature(enable = "avx2")]
fn load(bytes: &[u8; LANE_BYTES]) -> __m256i {
    // SAFETY: both types are 32 bytes, and every pattern of bits is a value of both.
    unsafe { mem::transmute::<[u8; LANE_BYTES], __m256i>(*bytes) }
}
