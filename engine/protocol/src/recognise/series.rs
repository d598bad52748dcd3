//! Series: the checkpoints of a run that follow one another.
//!
//! Owns: telling a later save of the same thing from its neighbour, by names. Does not own: the step of a name (`rules`), which checkpoints
//! are retired in favour of newer ones (`retention`).
//!
//! `model-epoch=2-loss=0.31.ckpt` comes after `model-epoch=1-loss=0.52.ckpt`. In contrast, `optimizer.pt` does not come after `model.pt`,
//! nor `layer_2.pt` after `layer_1.pt`: a job that loads one of them needs the other.

use super::frameworks::{OTHER_FILE, TORCH_FILE};
use super::rules::STEP;
use super::{Candidate, PARTS, Shape};
use crate::id::Step;
use regex::bytes::Regex;
use std::collections::BTreeSet;
use std::sync::LazyLock;

/// A measured value, as trainers put it into names. A number without a point may mean anything.
static MEASURED: LazyLock<Regex> =
    LazyLock::new(|| super::rules::ours(r"(?-u)[-+]?[0-9]+\.[0-9]+(?:[eE][-+]?[0-9]+)?"));

/// Lightning's version of a name that exists already: `epoch=1-step=200-v1.ckpt`.
static AGAIN: LazyLock<Regex> = LazyLock::new(|| super::rules::ours(r"(?-u)-v[0-9]+(\.ckpt)$"));

/// Returns the name of a checkpoint with all that changes from save to save as `#`. A number changes if the name says that it counts steps,
/// or if it is this checkpoint's `step`. A name without a step is a series of its own: its versions.
#[must_use]
pub fn series(name: &[u8], step: Option<Step>) -> Vec<u8> {
    let Some(step) = step else { return name.to_vec() };
    let name: &[u8] = &AGAIN.replace(name, &b"$1"[..]);
    let mut changes: Vec<(usize, usize)> = Vec::new();
    let counted = STEP.captures_iter(name).filter_map(|captures| captures.get(1));
    changes.extend(counted.chain(MEASURED.find_iter(name)).map(|found| (found.start(), found.end())));
    let is_step = |(from, to): &(usize, usize)| {
        let text = std::str::from_utf8(&name[*from..*to]).ok();
        text.and_then(|text| text.parse().ok()) == Some(step.0)
    };
    changes.extend(numbers(name).filter(is_step));
    changes.sort_unstable();
    let mut series = Vec::with_capacity(name.len());
    let mut at = 0;
    for (from, to) in changes {
        if from >= at {
            series.extend_from_slice(&name[at..from]);
            series.push(b'#');
        }
        at = at.max(to);
    }
    series.extend_from_slice(&name[at..]);
    series
}

/// Returns the name with each number as `*`: names that differ only in numbers become equal.
pub(crate) fn masked_digits(name: &[u8]) -> Vec<u8> {
    let mut masked = Vec::with_capacity(name.len());
    let mut at = 0;
    for (from, to) in numbers(name) {
        masked.extend_from_slice(&name[at..from]);
        masked.push(b'*');
        at = to;
    }
    masked.extend_from_slice(&name[at..]);
    masked
}

/// Names that trainers give to all that they need to go on, whatever its step: `last.pt`, `best-model.ckpt`, `checkpoint_last.pt`. Any
/// other word names something else: `best_params.pkl`.
static WHOLE_STATE: LazyLock<Regex> = LazyLock::new(|| {
    let word = "last|latest|newest|final|best|checkpoint|ckpt|resume";
    let format = format!("{TORCH_FILE}|{OTHER_FILE}");
    super::rules::ours(&format!(r"(?i-u)^(?:{word})(?:[-_.](?:{word}|model|v?[0-9]+))*(?:{format}|$)"))
});
static TORCH: LazyLock<Regex> = LazyLock::new(|| super::rules::ours(TORCH_FILE));
static OTHER: LazyLock<Regex> = LazyLock::new(|| super::rules::ours(OTHER_FILE));

/// Whether a job that lost one checkpoint may load the other of the same run in its place. Two saves of the same thing may: by their names,
/// which differ only in the step and measured values, or only in numbers. Two directories may, too. A checkpoint that trainers go on from
/// by its name may, if it has a format of the lost one.
///
/// For other shapes an earlier step stands in for a later one: a job that has since changed how it saves has no two of one name. For two
/// plain files an earlier step proves nothing: a run has a discriminator beside a generator, and the file that it began from.
///
/// `trained`: a trainer wrote the lost one. If no trainer wrote a directory with a model's parts, it is probably a download, perhaps of
/// another model than its neighbour. Then only a later step of the same thing is a save.
#[must_use]
pub fn may_stand_in(lost: &Candidate, other: &Candidate, trained: bool) -> bool {
    let name = |candidate: &Candidate| masked_digits(candidate.id.directory.as_bytes());
    let of = |candidate: &Candidate| series(candidate.id.directory.as_bytes(), candidate.step);
    if of(lost) == of(other) {
        return true;
    }
    if lost.framework == PARTS && !trained {
        return false;
    }
    let plain = |candidate: &Candidate| candidate.shape == Shape::Single;
    let earlier = lost.step.zip(other.step).is_some_and(|(lost, other)| other < lost);
    lost.is_directory() && other.is_directory()
        || earlier && !(plain(lost) && plain(other))
        || name(lost) == name(other)
        || is_called_whole(other.id.directory.as_bytes()) && !formats(lost).is_disjoint(&formats(other))
}

/// Returns the formats of those files that may be a checkpoint by themselves. Files that torch loads have several endings, which count as
/// one.
fn formats(candidate: &Candidate) -> BTreeSet<&[u8]> {
    candidate.files.keys().filter_map(|path| format_of(path.name())).collect()
}

fn format_of(name: &[u8]) -> Option<&[u8]> {
    if TORCH.is_match(name) {
        return Some(b".pt");
    }
    OTHER.find(name).map(|found| found.as_bytes())
}

/// Whether trainers go on from a file of this name, whatever else lies beside it.
pub(crate) fn is_called_whole(name: &[u8]) -> bool {
    WHOLE_STATE.is_match(name)
}

/// Returns the ranges of the runs of digits.
fn numbers(name: &[u8]) -> impl Iterator<Item = (usize, usize)> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let from = at + name[at..].iter().position(u8::is_ascii_digit)?;
        let digits = name[from..].iter().take_while(|byte| byte.is_ascii_digit()).count();
        at = from + digits;
        Some((from, at))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::path::RelPath;
    use crate::recognise::Rules;

    fn of(name: &str) -> String {
        let step = Rules::builtin().step(name.as_bytes());
        String::from_utf8(series(name.as_bytes(), step)).unwrap()
    }

    #[test]
    fn a_later_save_of_the_same_thing_has_the_same_series() {
        for (one, other) in [
            ("step1.pt", "step20.pt"),
            ("checkpoint-500", "checkpoint-1000"),
            ("iter_0000100", "iter_0001000"),
            ("model-epoch=03-step=40.ckpt", "model-epoch=04-step=50.ckpt"),
            ("model-epoch=03-val_loss=0.25.ckpt", "model-epoch=12-val_loss=-1.5e-05.ckpt"),
            ("step5_rank*.pt", "step6_rank*.pt"),
            ("G_step100.pth", "G_step200.pth"),
            ("epoch=1-step=200-v1.ckpt", "epoch=2-step=300.ckpt"),
            ("epoch=1-step=200-v1.ckpt", "epoch=2-step=300-v12.ckpt"),
        ] {
            assert_eq!(of(one), of(other), "{one} {other}");
        }
        let bare = |name: &str, step| series(name.as_bytes(), Some(Step(step)));
        assert_eq!(bare("0000100", 100), bare("200", 200), "a rule said that the number is the step");
        assert_eq!(of("model-epoch=03-step=40.ckpt"), "model-epoch=#-step=#.ckpt");
    }

    #[test]
    fn a_neighbour_is_of_another_series() {
        for (one, other) in [
            ("model.pt", "optimizer.pt"),
            ("G_step100.pth", "D_step100.pth"),
            ("layer_1.pt", "layer_2.pt"),
            ("part-00001.npz", "part-00002.npz"),
            ("best_fold1.pt", "best_fold2.pt"),
            ("fold1_epoch10.pt", "fold2_epoch10.pt"),
            ("step1.pt", "last.pt"),
            ("step1-v1.pt", "step1-v2.pt"),
        ] {
            assert_ne!(of(one), of(other), "{one} {other}");
        }
    }

    #[test]
    fn what_stands_in_differs_in_numbers_only() {
        let of = |path: &str| {
            let paths = [RelPath::new(path).unwrap()];
            Rules::builtin().group(&paths).candidates.remove(0)
        };
        let stands = |one: &str, other: &str| may_stand_in(&of(one), &of(other), false);
        assert!(stands("r/model_2.pt", "r/model_10.pt") && stands("r/step5.pt", "r/step5.pt"));
        assert!(!stands("r/model.pt", "r/optimizer.pt") && !stands("r/last.pt", "r/optimizer.pt"));
        let whole =
            ["last.pt", "best-model.ckpt", "checkpoint.pth.tar", "checkpoint_best.pt", "last-v1.ckpt"];
        for whole in whole.map(|name| format!("r/{name}")) {
            assert!(stands("r/step5.pt", &whole) && stands("r/step-5/model.pt", &whole), "{whole}");
        }
        for other in ["best_params.pkl", "best_scaler.pkl", "best_tokenizer.pt"] {
            let other = format!("r/{other}");
            assert!(!stands("r/step5.pt", &other) && !stands("r/step5.pkl", &other), "{other} is no model");
        }
        assert!(stands("r/step5.pkl", "r/best.pkl") && stands("r/step-5/model.h5", "r/last.h5"));
        assert!(
            !stands("r/step5.pt", "r/best.pkl") && !stands("r/step5.h5", "r/last.keras"),
            "another format"
        );
        assert!(stands("r/step-5/model.pt", "r/step-6/model.pt"), "two directories");
        assert!(stands("r/model-epoch=2-loss=0.31.ckpt", "r/model-epoch=1-loss=-1.5e-05.ckpt"), "measured");
        for (one, other) in [
            ("G_step5.pth", "D_step4.pth"),
            ("ckpt_epoch1.pth", "resnet_epoch90.pth"),
            ("checkpoint-5/model.pt", "resnet_epoch90.pth"),
        ] {
            assert!(!stands(&format!("r/{one}"), &format!("r/{other}")), "{one} {other}: another step alone");
        }
        assert!(stands("r/step-5/model.pt", "r/step4.pt"), "an earlier step in another shape");
        assert!(!stands("r/step-5/model.pt", "r/vocab.pt") && !stands("r/step5.pt", "r/vocab.pt"));
        assert!(!stands("r/G_step5.pth", "r/D_step5.pth"), "a neighbour of the same step");
        assert_eq!(masked_digits(b"a12b3"), b"a*b*");
    }

    #[test]
    fn a_model_in_parts_that_no_trainer_wrote_stands_in_for_no_other_model() {
        let of = |directory: &str| {
            let paths = [RelPath::new(format!("{directory}/model-00001-of-00002.safetensors")).unwrap()];
            Rules::builtin().group(&paths).candidates.remove(0)
        };
        for (lost, other) in [("m/B", "m/A"), ("m/llama-13b", "m/llama-7b"), ("m/B", "m/final")] {
            assert!(!may_stand_in(&of(lost), &of(other), false), "{lost} is being downloaded");
            assert!(may_stand_in(&of(lost), &of(other), true), "{lost} is a save");
        }
        assert!(may_stand_in(&of("r/checkpoint-10"), &of("r/checkpoint-5"), false), "a later step");
    }
}
