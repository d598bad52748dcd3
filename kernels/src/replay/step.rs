//! A step's hyperparameters, and the few factors that follow from them.
//!
//! Owns: the arithmetic that is done once per step, in f64, on the host, so that every back end gets the same f32 factors. Does not own:
//! the arithmetic per element (`reference`).

use super::ReplayError;

/// An optimizer step, as `torch.optim.Adam` or `AdamW` took it. Schedulers change these values between steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// The number of the step of these parameters: torch's `state["step"]` after it, so 1 for the first.
    pub number: u64,
    /// The learning rate, finite and not negative.
    pub lr: f64,
    /// Decay of the first moment: from 0, below 1.
    pub beta1: f64,
    /// Decay of the second moment: from 0, below 1.
    pub beta2: f64,
    /// The addend of the denominator, finite and not negative.
    pub eps: f64,
    /// Weight decay, finite and not negative.
    pub weight_decay: f64,
    /// How weights decay.
    pub decay: Decay,
    /// Whether the step climbs the gradient instead of descending.
    pub maximize: bool,
    /// The first factor of the gradient: 1 / loss scale × clipping coefficient. Finite.
    pub gradient_scale: f64,
    /// Whether the loss scaler skipped this step: it changes nothing, and the next step has its number.
    pub skipped: bool,
    /// Whether the step used amsgrad, which is refused: a third moment would be needed.
    pub amsgrad: bool,
}

/// How weights decay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decay {
    /// Adam: a part of the weight is added to the gradient.
    Coupled,
    /// AdamW: the weight shrinks before the step. (Loshchilov and Hutter, 2019.)
    Decoupled,
}

impl Step {
    /// Returns a step with `torch.optim.AdamW`'s defaults (lr 1e-3, betas 0.9 and 0.999, eps 1e-8, weight decay 0.01) for step `number`.
    #[must_use]
    pub fn adamw(number: u64) -> Self {
        Self {
            number,
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 1e-2,
            decay: Decay::Decoupled,
            maximize: false,
            gradient_scale: 1.0,
            skipped: false,
            amsgrad: false,
        }
    }

    /// Returns a step with `torch.optim.Adam`'s defaults (as AdamW's, without weight decay) for step `number`.
    #[must_use]
    pub fn adam(number: u64) -> Self {
        Self { weight_decay: 0.0, decay: Decay::Coupled, ..Self::adamw(number) }
    }

    /// Returns the factors of this step, which is the `at`th of its call (for the error).
    ///
    /// # Errors
    /// [`ReplayError::Hyperparameter`] names the first hyperparameter out of its range; [`ReplayError::Amsgrad`].
    pub fn factors(&self, at: usize) -> Result<Factors, ReplayError> {
        if self.amsgrad {
            return Err(ReplayError::Amsgrad { step: at });
        }
        let from_zero = 0.0..f64::INFINITY;
        let beta = 0.0..1.0;
        for (name, value, range) in [
            ("lr", self.lr, &from_zero),
            ("beta1", self.beta1, &beta),
            ("beta2", self.beta2, &beta),
            ("eps", self.eps, &from_zero),
            ("weight_decay", self.weight_decay, &from_zero),
            ("gradient_scale", self.gradient_scale.abs(), &from_zero),
        ] {
            if !range.contains(&value) {
                return Err(ReplayError::Hyperparameter { step: at, name, value });
            }
        }
        if self.number == 0 {
            return Err(ReplayError::StepNumber { step: at, found: 0, expected: 1 });
        }
        Ok(self.factors_unchecked())
    }

    fn factors_unchecked(&self) -> Factors {
        // As torch's loop: Python's floats, then one rounding each to the tensor's type.
        #[expect(
            clippy::cast_precision_loss,
            reason = "beyond 2^53 steps both corrections have been 1 for long"
        )]
        let number = self.number as f64;
        let correction1 = 1.0 - self.beta1.powf(number);
        let correction2 = 1.0 - self.beta2.powf(number);
        let sign = if self.maximize { -1.0 } else { 1.0 };
        let (shrink, coupled) = match self.decay {
            Decay::Coupled => (1.0, self.weight_decay),
            Decay::Decoupled => (1.0 - self.lr * self.weight_decay, 0.0),
        };
        let fresh1 = single(1.0 - self.beta1);
        let from_gradient = fresh1 >= 0.5;
        Factors {
            gradient: single(sign * self.gradient_scale),
            shrink: single(shrink),
            coupled: single(coupled),
            mix: if from_gradient { -(1.0 - fresh1) } else { fresh1 },
            beta2: single(self.beta2),
            fresh2: single(1.0 - self.beta2),
            correction: single(1.0 / correction2.sqrt()),
            eps: single(self.eps),
            stride: single(-(self.lr / correction1)),
            from_gradient,
        }
    }
}

/// The numbers by which a step multiplies and divides, or which it adds, for every element alike. `reference::update` has the formula.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Factors {
    /// The gradient's factor: its scale, negative where the step climbs.
    pub gradient: f32,
    /// The weight's factor before the step: 1 - lr × decay, or 1.
    pub shrink: f32,
    /// The part of the weight that is added to the gradient; 0 adds nothing, not even of an infinite weight.
    pub coupled: f32,
    /// How far `exp_avg` moves towards the gradient, or, from the gradient, towards the old value (then negative). torch's `lerp` begins at
    /// the nearer end.
    pub mix: f32,
    /// The factor of `exp_avg_sq`.
    pub beta2: f32,
    /// 1 - beta2, the factor of the squared gradient.
    pub fresh2: f32,
    /// 1 / √(1 - beta2ᵗ). torch's loop divides by the root on the CPU and multiplies by this on CUDA. All back ends here multiply: a
    /// division per element is a third of the time of a step whose state is in the cache.
    pub correction: f32,
    /// The addend of the denominator.
    pub eps: f32,
    /// -lr / (1 - beta1ᵗ).
    pub stride: f32,
    /// Whether `mix` begins at the gradient.
    pub from_gradient: bool,
}

#[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is what is meant")]
fn single(value: f64) -> f32 {
    value as f32
}
