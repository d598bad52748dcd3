//! Tests that all back ends compute the same as the reference, and the reference the same as torch.
//!
//! Owns: the cases for every back end, the device's too. Does not own: refused input (`refused`), or torch's values (`torch`).

mod refused;
mod torch;

use super::*;
use half::{bf16, f16};
use proptest::prelude::*;

/// A plain generator, so that a failure can be repeated from its seed.
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() >> 32).unwrap() % bound
    }

    /// Returns a value between -1 and 1, with many exponents.
    fn value(&mut self) -> f32 {
        let exponent = i32::try_from(self.below(24)).unwrap() - 23;
        (f32::from(u16::try_from(self.below(65536)).unwrap()) / 32768.0 - 1.0) * 2f32.powi(exponent)
    }

    /// Returns now and then a value that no training should produce, but files may have.
    fn odd_value(&mut self) -> f32 {
        const ODD: [f32; 9] = [
            f32::NAN,
            f32::INFINITY,
            f32::NEG_INFINITY,
            0.0,
            -0.0,
            f32::MAX,
            f32::MIN_POSITIVE,
            1e-42,
            -3e38,
        ];
        if self.below(5) == 0 { ODD[self.below(ODD.len())] } else { self.value() }
    }
}

/// A state that owns its memory.
#[derive(Clone, Debug)]
pub(super) struct Owned {
    pub(super) slices: [Vec<f32>; 3],
    pub(super) bf16: Vec<bf16>,
    pub(super) f16: Vec<f16>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Copy16 {
    None,
    Bf16,
    F16,
}

impl Owned {
    pub(super) fn new(elements: usize, random: &mut Random, odd: bool) -> Self {
        let mut slice = || -> Vec<f32> {
            (0..elements).map(|_| if odd { random.odd_value() } else { random.value() }).collect()
        };
        let mut slices = [slice(), slice(), slice()];
        if !odd {
            slices[2].iter_mut().for_each(|second| *second = second.abs());
        }
        Self { slices, bf16: vec![bf16::ZERO; elements], f16: vec![f16::ZERO; elements] }
    }

    pub(super) fn state(&mut self, copy: Copy16) -> State<'_> {
        let [weights, exp_avg, exp_avg_sq] = &mut self.slices;
        let half = match copy {
            Copy16::None => HalfCopy::None,
            Copy16::Bf16 => HalfCopy::Bf16(&mut self.bf16),
            Copy16::F16 => HalfCopy::F16(&mut self.f16),
        };
        State { weights, exp_avg, exp_avg_sq, half }
    }

    /// Compares every bit, except that all NaNs are equal.
    pub(super) fn assert_same(&self, expected: &Self, what: &str) {
        let bits = |value: f32| if value.is_nan() { f32::NAN.to_bits() } else { value.to_bits() };
        for (slice, name) in ["weights", "exp_avg", "exp_avg_sq"].into_iter().enumerate() {
            let pairs = self.slices[slice].iter().zip(&expected.slices[slice]);
            for (at, (&found, &expected)) in pairs.enumerate() {
                assert_eq!(bits(found), bits(expected), "{what}: {name}[{at}] is {found}, not {expected}");
            }
        }
        let as_f32 = |owned: &Self| -> Vec<u32> {
            let both =
                owned.bf16.iter().map(|half| half.to_f32()).chain(owned.f16.iter().map(|half| half.to_f32()));
            both.map(bits).collect()
        };
        assert_eq!(as_f32(self), as_f32(expected), "{what}: half copy");
    }
}

/// Gradients of every kind, with the memory that they borrow.
#[derive(Clone, Debug)]
pub(super) enum OwnedGradient {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
    Sparse { chunk_elements: usize, chunks: Vec<(Vec<i32>, Vec<f16>)> },
    Int8 { values: Vec<i8>, scales: Vec<f32>, block: usize },
}

impl OwnedGradient {
    /// Makes the `kind`th of five, over `elements`.
    pub(super) fn new(kind: usize, elements: usize, random: &mut Random, odd: bool) -> Self {
        let value = |random: &mut Random| if odd { random.odd_value() } else { random.value() };
        match kind {
            0 => Self::F32((0..elements).map(|_| value(random)).collect()),
            1 => Self::Bf16((0..elements).map(|_| bf16::from_f32(value(random))).collect()),
            2 => Self::F16((0..elements).map(|_| f16::from_f32(value(random))).collect()),
            3 => {
                // Many chunks, or one that may end beyond the range.
                let whole = elements.max(1) + random.below(2);
                let chunk_elements = if random.below(2) == 0 { 1 + random.below(700) } else { whole };
                let mut chunks = Vec::new();
                for begin in (0..elements).step_by(chunk_elements) {
                    let mut indices: Vec<i32> = Vec::new();
                    for index in 0..chunk_elements.min(elements - begin) {
                        if random.below(8) == 0 {
                            indices.push(i32::try_from(index).unwrap());
                        }
                    }
                    let values = indices.iter().map(|_| f16::from_f32(value(random))).collect();
                    chunks.push((indices, values));
                }
                Self::Sparse { chunk_elements, chunks }
            }
            _ => {
                let block = [1, 3, 256, usize::MAX][random.below(4)];
                let values = (0..elements).map(|_| random.next().to_le_bytes()[3].cast_signed()).collect();
                Self::Int8 {
                    values,
                    scales: (0..elements.div_ceil(block)).map(|_| value(random)).collect(),
                    block,
                }
            }
        }
    }

    fn chunks(&self) -> Vec<SparseChunk<'_>> {
        let Self::Sparse { chunks, .. } = self else { return Vec::new() };
        chunks.iter().map(|(indices, values)| SparseChunk { indices, values }).collect()
    }

    fn borrow<'a>(&'a self, chunks: &'a [SparseChunk<'a>]) -> Gradient<'a> {
        match self {
            Self::F32(values) => Gradient::F32(values),
            Self::Bf16(values) => Gradient::Bf16(values),
            Self::F16(values) => Gradient::F16(values),
            Self::Sparse { chunk_elements, .. } => {
                Gradient::Sparse { chunk_elements: *chunk_elements, chunks }
            }
            Self::Int8 { values, scales, block } => Gradient::Int8 { values, scales, block: *block },
        }
    }
}

/// Passes steps with their gradients to `run`.
pub(super) fn with_steps<T>(
    steps: &[(Step, OwnedGradient)],
    run: impl FnOnce(&[GradientStep<'_>]) -> T,
) -> T {
    let chunks: Vec<_> = steps.iter().map(|(_, gradient)| gradient.chunks()).collect();
    let borrowed: Vec<_> = steps
        .iter()
        .zip(&chunks)
        .map(|((step, gradient), chunks)| GradientStep { step: *step, gradient: gradient.borrow(chunks) })
        .collect();
    run(&borrowed)
}

/// Makes `count` steps that differ in everything; one in five is skipped.
pub(super) fn steps(
    count: usize,
    elements: usize,
    random: &mut Random,
    odd: bool,
) -> Vec<(Step, OwnedGradient)> {
    let mut number = 1 + random.next() % 1000;
    (0..count)
        .map(|_| {
            let skipped = random.below(5) == 0;
            let step = Step {
                lr: [0.0, 1e-3, 0.1][random.below(3)],
                beta1: [0.0, 0.3, 0.9][random.below(3)],
                beta2: [0.0, 0.95, 0.999][random.below(3)],
                eps: [0.0, 1e-8, 1e-3][random.below(3)],
                weight_decay: [0.0, 0.1][random.below(2)],
                decay: [Decay::Coupled, Decay::Decoupled][random.below(2)],
                maximize: random.below(2) == 0,
                gradient_scale: [1.0, 0.25, 1.0 / 3.0, 0.0][random.below(4)],
                skipped,
                ..Step::adam(number)
            };
            number += u64::from(!skipped);
            let kind = random.below(5);
            (step, OwnedGradient::new(kind, elements, random, odd))
        })
        .collect()
}

/// Makes both the state and the steps of a case.
pub(super) fn case(
    elements: usize,
    count: usize,
    seed: u64,
    odd: bool,
) -> (Owned, Vec<(Step, OwnedGradient)>, Copy16) {
    let mut random = Random::new(seed);
    let state = Owned::new(elements, &mut random, odd);
    let copy = [Copy16::None, Copy16::Bf16, Copy16::F16][random.below(3)];
    let steps = steps(count, elements, &mut random, odd);
    (state, steps, copy)
}

pub(super) fn expected(state: &Owned, steps: &[(Step, OwnedGradient)], copy: Copy16) -> Owned {
    let mut expected = state.clone();
    with_steps(steps, |steps| reference::replay(&mut expected.state(copy), steps)).unwrap();
    expected
}

fn every_backend_agrees(elements: usize, count: usize, seed: u64, odd: bool, threads: usize) {
    let (state, steps, copy) = case(elements, count, seed, odd);
    let expected = expected(&state, &steps, copy);
    for backend in CpuBackend::all_here() {
        let mut found = state.clone();
        with_steps(&steps, |steps| backend.replay(&mut found.state(copy), steps, threads)).unwrap();
        found.assert_same(&expected, &format!("{backend:?}, {elements} elements, seed {seed}"));
    }
}

proptest! {
    #[test]
    fn every_backend_agrees_with_the_reference(
        elements in 0usize..5000,
        count in 0usize..8,
        seed in any::<u64>(),
        odd in any::<bool>(),
        threads in 0usize..4,
    ) {
        every_backend_agrees(elements, count, seed, odd, threads);
    }
}

/// Each length near a multiple of a register's width takes another tail.
#[test]
fn every_short_length_agrees() {
    for elements in 0..70 {
        every_backend_agrees(elements, 5, 7 + u64::try_from(elements).unwrap(), true, 1);
    }
}

/// Length for pieces that several threads take, with every kind of gradient over their boundaries.
#[test]
fn pieces_and_threads_do_not_change_the_result() {
    for threads in [1, 2, 3, usize::MAX] {
        every_backend_agrees(300_001, 6, 11, false, threads);
    }
}

#[test]
fn many_steps_at_once_are_the_same_steps_one_by_one() {
    let (state, steps, copy) = case(3000, 40, 23, false);
    let mut at_once = state.clone();
    with_steps(&steps, |steps| replay(&mut at_once.state(copy), steps, 2)).unwrap();
    let mut one_by_one = state;
    for step in &steps {
        with_steps(std::slice::from_ref(step), |step| replay(&mut one_by_one.state(copy), step, 1)).unwrap();
    }
    at_once.assert_same(&one_by_one, "40 steps");
}

#[test]
fn skipped_steps_change_nothing_and_their_gradient_is_not_looked_at() {
    let mut random = Random::new(3);
    let before = Owned::new(100, &mut random, false);
    let skipped = Step { skipped: true, ..Step::adamw(9) };
    let mut after = before.clone();
    let steps = [GradientStep { step: skipped, gradient: Gradient::F32(&[f32::NAN]) }; 3];
    replay(&mut after.state(Copy16::None), &steps, 1).unwrap();
    after.assert_same(&before, "skipped");
    // The half copy still matches the weights.
    replay(&mut after.state(Copy16::Bf16), &steps, 1).unwrap();
    assert_eq!(after.bf16[7], bf16::from_f32(before.slices[0][7]));
}

#[test]
fn an_element_that_a_sparse_gradient_lacks_moves_as_with_gradient_zero() {
    let mut random = Random::new(5);
    let before = Owned::new(5000, &mut random, false);
    let step = Step::adamw(4);
    let sparse = OwnedGradient::Sparse {
        chunk_elements: 4999,
        chunks: vec![(vec![0, 4998], vec![f16::ONE; 2]), (vec![0], vec![f16::ONE])],
    };
    let mut dense = vec![0.0; 5000];
    for at in [0, 4998, 4999] {
        dense[at] = 1.0;
    }
    let same = [
        expected(&before, &[(step, sparse)], Copy16::None),
        expected(&before, &[(step, OwnedGradient::F32(dense))], Copy16::None),
    ];
    same[0].assert_same(&same[1], "sparse");
    assert_ne!(same[0].slices[0][17].to_bits(), before.slices[0][17].to_bits());
}

/// `half` has loops for processors with a conversion, and others for those without: both round as IEEE says.
#[test]
fn every_half_value_and_its_neighbours_round_as_the_reference() {
    let mut weights = Vec::new();
    for bits in 0..=u16::MAX {
        for value in [f16::from_bits(bits).to_f32(), bf16::from_bits(bits).to_f32()] {
            weights.extend([value, f32::from_bits(value.to_bits().wrapping_add(0x0fff))]);
            weights
                .extend([f32::from_bits(value.to_bits() ^ 0x1000), f32::from_bits(value.to_bits() ^ 0x8000)]);
        }
    }
    let elements = weights.len();
    let owned = Owned {
        slices: [weights, vec![0.0; elements], vec![0.0; elements]],
        bf16: vec![bf16::ZERO; elements],
        f16: vec![f16::ZERO; elements],
    };
    for copy in [Copy16::Bf16, Copy16::F16] {
        let expected = expected(&owned, &[], copy);
        for backend in CpuBackend::all_here() {
            let mut found = owned.clone();
            backend.replay(&mut found.state(copy), &[], 2).unwrap();
            found.assert_same(&expected, &format!("{backend:?}, {copy:?}"));
        }
    }
}
