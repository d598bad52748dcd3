//! Tests that replay agrees with torch's optimizer.
//!
//! Owns: reading torch's own values (`vectors/make.py` made them) and the bound. Does not own: the bound's number, which is public.

use super::super::*;
use super::{Copy16, Owned};

const VECTORS: &str = include_str!("../vectors/torch.txt");

struct Case {
    name: &'static str,
    before: Vec<f32>,
    steps: Vec<Step>,
    gradients: Vec<Vec<f32>>,
    after: [Vec<f32>; 3],
}

fn cases() -> Vec<Case> {
    let mut cases: Vec<Case> = Vec::new();
    for line in VECTORS.lines() {
        let mut words = line.split(' ');
        let kind = words.next().unwrap();
        if kind == "case" {
            let name = words.next().unwrap();
            cases.push(Case {
                name,
                before: vec![],
                steps: vec![],
                gradients: vec![],
                after: Default::default(),
            });
            continue;
        }
        let case = cases.last_mut().unwrap();
        if kind == "step" {
            let mut number = || words.next().unwrap().parse::<f64>().unwrap();
            let at = u64::try_from(case.steps.len()).unwrap() + 1;
            let [lr, beta1, beta2, eps, weight_decay, decoupled, maximize, gradient_scale] =
                std::array::from_fn(|_| number());
            case.steps.push(Step {
                lr,
                beta1,
                beta2,
                eps,
                weight_decay,
                decay: if decoupled == 1.0 { Decay::Decoupled } else { Decay::Coupled },
                maximize: maximize == 1.0,
                gradient_scale,
                ..Step::adam(at)
            });
            continue;
        }
        let values = words.map(|word| f32::from_bits(u32::from_str_radix(word, 16).unwrap())).collect();
        match kind {
            "weights" if case.before.is_empty() => case.before = values,
            "gradient" => case.gradients.push(values),
            "weights" => case.after[0] = values,
            "exp_avg" => case.after[1] = values,
            "exp_avg_sq" => case.after[2] = values,
            other => panic!("{other} is not in a case"),
        }
    }
    cases
}

/// Returns the largest value that each slice of an element, or a value added to it, had.
fn largest(case: &Case, at: usize) -> [f32; 3] {
    let mut element = [case.before[at], 0.0, 0.0];
    let mut largest = element.map(f32::abs);
    for (step, gradient) in case.steps.iter().zip(&case.gradients) {
        let factors = step.factors(0).unwrap();
        let added = gradient[at] * factors.gradient;
        element = reference::update(&factors, element, gradient[at]);
        largest = [
            largest[0].max(element[0].abs()),
            largest[1].max(element[1].abs()).max((added * factors.mix).abs()),
            largest[2].max(element[2]),
        ];
    }
    largest
}

#[test]
fn the_result_is_within_the_bound_of_torchs_loop() {
    let cases = cases();
    assert_eq!(cases.len(), 9, "as many as make.py has");
    for case in cases {
        let elements = case.before.len();
        let mut owned = Owned {
            slices: [case.before.clone(), vec![0.0; elements], vec![0.0; elements]],
            bf16: vec![],
            f16: vec![],
        };
        let steps: Vec<_> = case
            .steps
            .iter()
            .zip(&case.gradients)
            .map(|(&step, gradient)| GradientStep { step, gradient: Gradient::F32(gradient) })
            .collect();
        replay(&mut owned.state(Copy16::None), &steps, 1).unwrap();
        let bound = f64::from(TORCH_ULPS_PER_STEP) * f64::from(u32::try_from(steps.len()).unwrap());
        let mut most = [0.0f64; 3];
        for at in 0..elements {
            let largest = largest(&case, at);
            for slice in 0..3 {
                let (found, torch) = (owned.slices[slice][at], case.after[slice][at]);
                let unit = f64::from(largest[slice].next_up()) - f64::from(largest[slice]);
                most[slice] = most[slice].max((f64::from(found) - f64::from(torch)).abs() / unit);
            }
        }
        eprintln!("{}: at most {most:?} units of the last place from torch", case.name);
        assert!(most.iter().all(|&ulps| ulps <= bound), "{}: {most:?} is beyond {bound}", case.name);
    }
}
