//! Parts that do not fit cause an error that names both values, and nothing has changed.
//!
//! Owns: one case per check. Does not own: accepted input.

use super::super::*;
use super::{Copy16, Owned, Random};
use half::{bf16, f16};

const ELEMENTS: usize = 10;

fn refused(step: Step, gradient: Gradient<'_>) -> ReplayError {
    let before = Owned::new(ELEMENTS, &mut Random::new(1), false);
    let steps = [
        GradientStep {
            step: Step::adam(step.number.saturating_sub(1).max(1)),
            gradient: Gradient::F32(&[1.0; ELEMENTS]),
        },
        GradientStep { step, gradient },
    ];
    let mut after = before.clone();
    let why = replay(&mut after.state(Copy16::None), &steps, 1).expect_err("it does not fit");
    after.assert_same(&before, "refused");
    // As words: a NaN among the values is not equal to itself.
    let by_reference =
        reference::replay(&mut after.state(Copy16::None), &steps).expect_err("it does not fit");
    assert_eq!(by_reference.to_string(), why.to_string());
    why
}

fn refused_gradient(gradient: Gradient<'_>) -> ReplayError {
    refused(Step::adam(2), gradient)
}

#[test]
fn gradients_of_another_length() {
    let wrong = |what, found, expected| ReplayError::GradientLength { step: 1, what, found, expected };
    assert_eq!(refused_gradient(Gradient::F32(&[0.0; 9])), wrong("values", 9, 10));
    assert_eq!(refused_gradient(Gradient::Bf16(&[bf16::ZERO; 11])), wrong("values", 11, 10));
    assert_eq!(refused_gradient(Gradient::F16(&[])), wrong("values", 0, 10));
    let int8 = |values, scales, block| refused_gradient(Gradient::Int8 { values, scales, block });
    assert_eq!(int8(&[0; 3], &[1.0], 256), wrong("values", 3, 10));
    assert_eq!(int8(&[0; 10], &[1.0; 2], 3), wrong("scales", 2, 4));
    assert_eq!(
        int8(&[0; 10], &[], 0),
        ReplayError::GradientUnit { step: 1, what: "block", found: 0, most: usize::MAX }
    );
}

#[test]
fn sparse_gradients_that_are_none() {
    let sparse = |chunk_elements, chunks: &[SparseChunk<'_>]| {
        refused_gradient(Gradient::Sparse { chunk_elements, chunks })
    };
    let chunk = |indices| SparseChunk { indices, values: &[f16::ONE; 2] };
    for found in [0, CHUNK_ELEMENTS_MAX + 1] {
        let why = ReplayError::GradientUnit { step: 1, what: "chunk", found, most: CHUNK_ELEMENTS_MAX };
        assert_eq!(sparse(found, &[]), why);
    }
    let wrong = |what, found, expected| ReplayError::GradientLength { step: 1, what, found, expected };
    assert_eq!(sparse(4, &[SparseChunk::default(); 2]), wrong("list of chunks", 2, 3));
    assert_eq!(sparse(10, &[chunk(&[1])]), wrong("values of a chunk", 2, 1));
    let index = |chunk, entry, found, least, elements| ReplayError::Index {
        step: 1,
        chunk,
        entry,
        found,
        least,
        elements,
    };
    assert_eq!(sparse(10, &[chunk(&[-1, 3])]), index(0, 0, -1, 0, 10));
    assert_eq!(sparse(10, &[chunk(&[3, 3])]), index(0, 1, 3, 4, 10));
    assert_eq!(sparse(CHUNK_ELEMENTS_MAX, &[chunk(&[3, i32::MAX])]), index(0, 1, i32::MAX, 4, 10));
    // The last chunk is shorter than the others.
    assert_eq!(sparse(8, &[chunk(&[0, 7]), chunk(&[1, 2])]), index(1, 1, 2, 2, 2));
}

#[test]
fn hyperparameters_out_of_their_range() {
    let good = Step::adamw(2);
    let gradient = Gradient::F32(&[1.0; ELEMENTS]);
    for (step, name) in [
        (Step { lr: -1.0, ..good }, "lr"),
        (Step { lr: f64::NAN, ..good }, "lr"),
        (Step { beta1: 1.0, ..good }, "beta1"),
        (Step { beta2: -0.1, ..good }, "beta2"),
        (Step { eps: f64::INFINITY, ..good }, "eps"),
        (Step { weight_decay: -0.1, ..good }, "weight_decay"),
        (Step { gradient_scale: f64::NAN, ..good }, "gradient_scale"),
    ] {
        let why = refused(step, gradient);
        assert!(
            matches!(why, ReplayError::Hyperparameter { step: 1, name: found, .. } if found == name),
            "{why}"
        );
    }
    assert_eq!(refused(Step { amsgrad: true, ..good }, gradient), ReplayError::Amsgrad { step: 1 });
}

#[test]
fn steps_that_do_not_follow_each_other() {
    let gradient = Gradient::F32(&[1.0]);
    let mut owned = Owned::new(1, &mut Random::new(1), false);
    let mut run = |steps: &[Step]| {
        let steps: Vec<_> = steps.iter().map(|&step| GradientStep { step, gradient }).collect();
        replay(&mut owned.state(Copy16::None), &steps, 1)
    };
    let skipped = Step { skipped: true, ..Step::adam(3) };
    assert_eq!(run(&[Step::adam(2), skipped, skipped, Step::adam(3)]), Ok(()));
    for (wrong, found, expected) in [([2, 4], 4, 3), ([2, 2], 2, 3), ([u64::MAX, 0], 0, 1)] {
        let why = ReplayError::StepNumber { step: 1, found, expected };
        assert_eq!(run(&wrong.map(Step::adam)), Err(why));
    }
    assert_eq!(
        run(&vec![skipped; STEPS_MAX + 1]),
        Err(ReplayError::Steps { found: STEPS_MAX + 1, most: STEPS_MAX })
    );
}

#[test]
fn states_whose_slices_differ() {
    let run = |exp_avg: usize, exp_avg_sq: usize, copy: usize| {
        let mut state = State {
            weights: &mut [0.0; 3],
            exp_avg: &mut vec![0.0; exp_avg],
            exp_avg_sq: &mut vec![0.0; exp_avg_sq],
            half: HalfCopy::F16(&mut vec![f16::ZERO; copy]),
        };
        replay(&mut state, &[], 1)
    };
    assert_eq!(run(3, 3, 3), Ok(()));
    for (lengths, what) in [([2, 3, 3], "exp_avg"), ([3, 2, 3], "exp_avg_sq"), ([3, 3, 2], "half copy")] {
        let [first, second, copy] = lengths;
        assert_eq!(run(first, second, copy), Err(ReplayError::Length { what, found: 2, expected: 3 }));
    }
}
