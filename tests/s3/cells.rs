//! The matrix as data: the requests of each scene, and the faults of each kind of request.
//!
//! Owns: the list of cells, and the expected end of each. Does not own: their play (`scene`, `matrix`).

use std::fmt;
use tidemark_tests::s3::{FaultEffect, S3Operation};

/// The engine's work when the fault meets it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scene {
    /// Two files, one of them in parts, are prepared and committed.
    Save,
    /// The same save on a store that checks no checksum.
    SaveUnchecked,
    /// A loose file and its sidecar.
    Loose,
    /// A retirement of one of two committed versions.
    Retire,
    /// A start of a daemon, which reads everything, decides undecided versions and sweeps leftovers.
    Restart,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Met {
    Once,
    Always,
}

/// A fault without which the request would not be made.
pub(super) type Given = (S3Operation, &'static str, Option<u64>, FaultEffect);

/// A request of a scene.
#[derive(Debug, Clone, Copy)]
pub(super) struct Target {
    pub(super) scene: Scene,
    pub(super) operation: S3Operation,
    /// Text that the request's path and query contain.
    pub(super) object: &'static str,
    pub(super) given: Option<Given>,
}

/// A fault in one request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cell {
    pub(super) target: Target,
    pub(super) effect: FaultEffect,
    pub(super) met: Met,
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Target { scene, operation, object, .. } = self.target;
        let names = (format!("{scene:?}"), format!("{operation:?}"), format!("{:?}", self.effect));
        write!(f, "{:<13} {:<23} {object:<17} {:<30} {:?}", names.0, names.1, names.2, self.met)
    }
}

/// Limit of a request in cells whose fault is met once, since its repetition must have the time to succeed.
const TIMEOUT_ONCE_MS: u64 = 1000;
/// Limit of a request in cells whose fault is always met, since nothing has to succeed until it is gone.
const TIMEOUT_ALWAYS_MS: u64 = 200;

const SAVE: &[(S3Operation, &str)] = &[
    (S3Operation::PutObject, "attempt.json"),
    (S3Operation::PutObject, "meta.json"),
    (S3Operation::CreateMultipartUpload, "model.bin"),
    (S3Operation::UploadPart, "partNumber=1"),
    (S3Operation::CompleteMultipartUpload, "model.bin"),
    (S3Operation::PutObject, "prepared-"),
    (S3Operation::PutObject, "manifest-"),
    (S3Operation::ListObjects, "epoch"),
    (S3Operation::PutObject, "_COMMITTED"),
];

const SAVE_UNCHECKED: &[(S3Operation, &str)] = &[
    (S3Operation::PutObject, "attempt.json"),
    (S3Operation::PutObject, "meta.json"),
    (S3Operation::UploadPart, "partNumber=1"),
    (S3Operation::PutObject, "prepared-"),
    (S3Operation::PutObject, "manifest-"),
    (S3Operation::PutObject, "_COMMITTED"),
    // The data and each document are read back.
    (S3Operation::GetObject, "model.bin"),
    (S3Operation::GetObject, "prepared-"),
    (S3Operation::GetObject, "_COMMITTED"),
];

const LOOSE: &[(S3Operation, &str)] =
    &[(S3Operation::PutObject, "notes.txt/g-1"), (S3Operation::PutObject, "g-1.json")];

const RETIRE: &[(S3Operation, &str)] = &[
    (S3Operation::ListObjects, "epoch"),
    (S3Operation::GetObject, "v0.1/_COMMITTED"),
    (S3Operation::PutObject, "_RETIRED"),
    (S3Operation::ListObjects, "boundary"),
    (S3Operation::PutObject, "boundary"),
    (S3Operation::ListObjects, "v0.1%2Fa-"),
    (S3Operation::DeleteObject, "meta.json"),
    (S3Operation::DeleteObject, "manifest-"),
];

const RESTART: &[(S3Operation, &str)] = &[
    (S3Operation::ListObjects, "v0.1%2F"),
    (S3Operation::ListObjects, "v0.3%2F"),
    (S3Operation::GetObject, "v0.1/_COMMITTED"),
    (S3Operation::GetObject, "v0.2/_COMMITTED"),
    (S3Operation::GetObject, "manifest-"),
    (S3Operation::GetObject, "attempt.json"),
    (S3Operation::GetObject, "prepared-"),
    (S3Operation::PutObject, "manifest-"),
    (S3Operation::PutObject, "v0.3/_COMMITTED"),
    (S3Operation::ListObjects, "v0.2%2Fa-"),
    (S3Operation::DeleteObject, "v0.2"),
    (S3Operation::ListMultipartUploads, ""),
    (S3Operation::AbortMultipartUpload, "v0.1"),
];

/// Requests that are made only after another fault.
const IN_DOUBT: &[(S3Operation, &str, Given)] = &[
    (
        S3Operation::GetObject,
        "_COMMITTED",
        (S3Operation::PutObject, "_COMMITTED", Some(1), FaultEffect::PreconditionFailedAfterSuccess),
    ),
    (
        S3Operation::HeadObject,
        "model.bin",
        (S3Operation::CompleteMultipartUpload, "model.bin", Some(1), FaultEffect::Status500After),
    ),
    (
        S3Operation::AbortMultipartUpload,
        "model.bin",
        (S3Operation::UploadPart, "partNumber=1", None, FaultEffect::Status500Before),
    ),
];

/// Returns every cell, in the order of the scenes.
pub(super) fn all() -> Vec<Cell> {
    let plain = [
        (Scene::Save, SAVE),
        (Scene::SaveUnchecked, SAVE_UNCHECKED),
        (Scene::Loose, LOOSE),
        (Scene::Retire, RETIRE),
        (Scene::Restart, RESTART),
    ];
    let plain = plain.into_iter().flat_map(|(scene, targets)| {
        targets.iter().map(move |&(operation, object)| Target { scene, operation, object, given: None })
    });
    let in_doubt = IN_DOUBT.iter().map(|&(operation, object, given)| Target {
        scene: Scene::Save,
        operation,
        object,
        given: Some(given),
    });
    let mut cells = Vec::new();
    for target in plain.chain(in_doubt) {
        for met in [Met::Once, Met::Always] {
            let effects = effects(&target, met).into_iter();
            cells.extend(effects.map(|effect| Cell { target, effect, met }));
        }
    }
    cells
}

/// Returns the possible faults of a request of this kind.
fn effects(target: &Target, met: Met) -> Vec<FaultEffect> {
    use FaultEffect::{
        Conflict409, CutRequestBody, DamagedOnWrite, DropConnection, LateAfterTimeout, ListWithDeleted,
        ListWithoutNewest, NoSuchUploadAfterSuccess, OkWithErrorBodyAfter, OkWithErrorBodyBefore,
        PreconditionFailedAfterSuccess, SlowBody, SlowRequestBody, Status500After, Status500Before,
        TimeoutAfter, TimeoutBefore, WrongChecksumOnRead,
    };
    if target.scene == Scene::SaveUnchecked {
        // All other faults are as on a store that checks.
        return match target.operation {
            S3Operation::GetObject => vec![TimeoutBefore, Status500Before, WrongChecksumOnRead, SlowBody],
            _ => vec![DamagedOnWrite],
        };
    }
    let late = LateAfterTimeout(timeout_ms(met) * 3 / 2);
    let any = [TimeoutBefore, Status500Before, DropConnection];
    let any_write = [TimeoutAfter, late, Status500After, Conflict409];
    let body = [SlowRequestBody, CutRequestBody, DamagedOnWrite];
    let more: Vec<FaultEffect> = match target.operation {
        S3Operation::PutObject => {
            // To a request without a condition, no store answers 412.
            let conditional = !matches!(target.object, "meta.json" | "notes.txt/g-1");
            let taken = conditional.then_some(PreconditionFailedAfterSuccess);
            any_write.into_iter().chain(body).chain(taken).collect()
        }
        S3Operation::UploadPart => any_write.into_iter().chain(body).collect(),
        S3Operation::CompleteMultipartUpload => any_write
            .into_iter()
            .chain([OkWithErrorBodyBefore, OkWithErrorBodyAfter])
            .chain([PreconditionFailedAfterSuccess, NoSuchUploadAfterSuccess])
            .collect(),
        S3Operation::AbortMultipartUpload => {
            any_write.into_iter().chain([NoSuchUploadAfterSuccess]).collect()
        }
        S3Operation::CreateMultipartUpload | S3Operation::DeleteObject => any_write.to_vec(),
        S3Operation::GetObject => vec![WrongChecksumOnRead, SlowBody, Conflict409],
        S3Operation::ListObjects => {
            vec![SlowBody, ListWithoutNewest(1), ListWithoutNewest(3), ListWithDeleted]
        }
        S3Operation::ListMultipartUploads => vec![SlowBody],
        S3Operation::HeadObject | S3Operation::DeleteObjects | S3Operation::Other => vec![],
    };
    any.into_iter().chain(more).collect()
}

const fn timeout_ms(met: Met) -> u64 {
    match met {
        Met::Once => TIMEOUT_ONCE_MS,
        Met::Always => TIMEOUT_ALWAYS_MS,
    }
}

/// Required end of the first run, which has the fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Expected {
    /// The client or the engine goes on by itself.
    Done,
    /// The request cannot have taken effect.
    NotDone,
    Either,
}

impl Cell {
    pub(super) fn timeout_ms(&self) -> u64 {
        timeout_ms(self.met)
    }

    /// Returns how long after its request's limit the fault may still take effect.
    pub(super) fn late_ms(&self) -> Option<u64> {
        match self.effect {
            FaultEffect::LateAfterTimeout(after_ms) => Some(after_ms),
            _ => None,
        }
    }

    /// Whether request after request runs into its limit.
    pub(super) fn is_slow(&self) -> bool {
        let unanswered = matches!(
            self.effect,
            FaultEffect::TimeoutBefore
                | FaultEffect::TimeoutAfter
                | FaultEffect::LateAfterTimeout(_)
                | FaultEffect::SlowRequestBody
                | FaultEffect::SlowBody
        );
        unanswered && self.met == Met::Always
    }

    pub(super) fn is_stale(&self) -> bool {
        matches!(self.effect, FaultEffect::ListWithoutNewest(_) | FaultEffect::ListWithDeleted)
    }

    /// Whether a store takes bytes that arrived damaged.
    pub(super) fn is_damage_taken(&self) -> bool {
        self.target.scene == Scene::SaveUnchecked && self.effect == FaultEffect::DamagedOnWrite
    }

    pub(super) fn expected(&self) -> Expected {
        let given_for_ever = matches!(self.target.given, Some((.., None, _)));
        if given_for_ever {
            return Expected::NotDone;
        }
        if self.target.scene == Scene::SaveUnchecked || self.is_stale() {
            return Expected::Either;
        }
        let without_effect = matches!(
            self.effect,
            FaultEffect::TimeoutBefore
                | FaultEffect::Status500Before
                | FaultEffect::OkWithErrorBodyBefore
                | FaultEffect::Conflict409
                | FaultEffect::SlowRequestBody
                | FaultEffect::CutRequestBody
                | FaultEffect::DamagedOnWrite
                | FaultEffect::SlowBody
        );
        match self.met {
            Met::Once => Expected::Done,
            // A start does not wait for its sweep.
            Met::Always if without_effect && self.target.scene != Scene::Restart => Expected::NotDone,
            Met::Always => Expected::Either,
        }
    }
}
