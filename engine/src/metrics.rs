//! The table of everything this node measures.
//!
//! Owns: names, units, kinds, help and stability; the handles by which the flows record; the text for
//! Prometheus. Does not own: when a value is recorded (each flow), serving the text (the control crate).
//!
//! Names use the flows' words, begin with `tidemark_` and end with the unit (counters then with
//! `_total`, as OpenMetrics asks). Labels have few values, fixed in code: never a path, a run or a step, which have no
//! bound. A metric that no code records is worse than none, and a test fails for it: add a metric together with the
//! line that records it.

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Metric, Registry, Unit};
use std::fmt;
use std::sync::atomic::AtomicU64;

/// A label with few values, such as `[("opcode", "create")]`.
pub type Label = [(&'static str, &'static str); 1];
/// A counter for each value of a label.
pub type CounterBy = Family<Label, Counter>;
/// A gauge for each value of a label.
pub type GaugeBy = Family<Label, Gauge>;
/// A gauge of a fraction or of seconds.
pub type GaugeF64 = Gauge<f64, AtomicU64>;

/// The extent to which users may rely on a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stability {
    /// Name, unit and meaning stay.
    Stable,
    /// Anything may change, with a release note.
    Trial,
}

/// A row of the table.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    /// The field of [`Metrics`], by which the code records it.
    pub field: &'static str,
    /// The name without prefix and unit.
    pub name: &'static str,
    /// The unit: `bytes`, `seconds`, `ratios`, or `count` for things that are only counted.
    pub unit: &'static str,
    /// The kind: `counter`, `gauge` or `histogram`.
    pub kind: &'static str,
    pub help: &'static str,
    pub stability: Stability,
}

/// Makes the struct, its registration and [`TABLE`] from the same rows.
macro_rules! metrics {
    ($($field:ident: $handle:ident, $unit:ident, $stability:ident, $help:literal;)+) => {
        /// The handles. Recording is an atomic operation or two (a family: a read lock too); clones of a handle count together.
        pub struct Metrics {
            registry: Registry,
            $(#[doc = $help] pub $field: kinds::$handle,)+
        }

        /// Every metric, in the order of the flows.
        pub const TABLE: &[Row] = &[
            $(Row {
                field: stringify!($field),
                name: name_of(stringify!($field), units::$unit),
                unit: units::$unit,
                kind: kinds::names::$handle,
                help: $help,
                stability: Stability::$stability,
            },)+
        ];

        impl Metrics {
            /// Makes all metrics, at zero.
            #[must_use]
            pub fn new() -> Self {
                let mut registry = Registry::with_prefix("tidemark");
                let mut rows = TABLE.iter();
                $(
                    let row = rows.next().expect("the table has a row for each field, in this order");
                    let $field = kinds::new::$handle();
                    register(&mut registry, row, $field.clone());
                )+
                Self { registry, $($field,)+ }
            }
        }
    };
}

metrics! {
    // save: create → write → seal → upload → commit → reclaim
    create_files: Count, count, Stable, "Files made on the mount";
    seal_files: Count, count, Stable, "Files sealed";
    seal_bytes: Count, bytes, Stable, "Bytes hashed to seal files";
    seal_seconds: Times, seconds, Stable, "Time to hash one file at its seal, pauses for programs included";
    seal_voided_files: Count, count, Trial, "Seals given up because the file was opened for writing meanwhile";
    replica_sent_bytes: Count, bytes, Stable, "Bytes sent to partners, those sent again included";
    replica_received_bytes: Count, bytes, Stable, "Bytes of peer copies that were verified and kept";
    replica_spared_bytes: Count, bytes, Stable, "Bytes of peer copies that were not sent because the partner proved to have them";
    replica_acknowledged_files: Count, count, Stable, "Copies of files of this node that a partner acknowledged";
    replica_withdrawn_files: Count, count, Stable, "Acknowledged copies that their holder has no longer";
    replica_pace_bytes: Level, bytes, Trial, "Bytes a second that copies may take now, so that they end before the next checkpoint; 0 without a limit";
    upload_files: Count, count, Stable, "Files uploaded to Tier-3";
    upload_bytes: Count, bytes, Stable, "Bytes uploaded to Tier-3";
    encode_in_bytes: Count, bytes, Trial, "Bytes of files that went to Tier-3 encoded";
    encode_out_bytes: Count, bytes, Trial, "Bytes that they have there";
    upload_seconds: Times, seconds, Stable, "Time to upload one file";
    upload_failures: Count, count, Stable, "Uploads of a file that failed and will be tried again";
    upload_parts_in_flight: Level, count, Trial, "Parts being sent to Tier-3 now";
    upload_window_parts: Level, count, Trial, "Parts that may be on their way to Tier-3 at once, as learnt from its rate";
    prepare_versions: Count, count, Stable, "Versions whose prepared marker was written";
    commit_versions: Count, count, Stable, "Versions committed";
    commit_seconds: Times, seconds, Stable, "Time from complete to committed";
    commit_doubts: Count, count, Stable, "Answers of Tier-3 that did not say whether an object was created, resolved by reading";
    torn_versions: Count, count, Stable, "Versions whose writers went away before they were complete";
    torn_hidden: Count, count, Stable, "Those of them that went out of sight";
    retire_versions: Count, count, Stable, "Committed versions given up in Tier-3";
    reclaim_bytes: Count, bytes, Stable, "Bytes of host copies reclaimed";
    // restore: locate → fetch → verify → serve
    fetch_files: Count, count, Stable, "Files fetched because they were opened";
    fetch_bytes: Count, bytes, Stable, "Bytes fetched from Tier-3";
    fetch_seconds: Times, seconds, Stable, "Time to fetch and verify one file";
    fetch_peer_bytes: Count, bytes, Stable, "Bytes fetched from peers";
    fetch_failures: Count, count, Stable, "Files of which no copy could be fetched whole";
    fetch_window_chunks: Level, count, Trial, "Chunks that may be on their way from Tier-3 at once, as learnt from its rate";
    verify_mismatches: CountBy, count, Stable, "Chunks that were not what their checksum says, by copy";
    scrub_bytes: Count, bytes, Stable, "Bytes of sealed host copies read again by the scrub";
    scrub_repaired_files: Count, count, Stable, "Host copies replaced after a scrub or a verify found them bad";
    // names over nodes
    coordinator_calls: CountBy, count, Stable, "What this node asked of the coordinator over the network, by call";
    catalog_calls: CountBy, count, Stable, "What the coordinator answered, and the times that it had a node publish first, by call";
    // what is
    tier1_used_bytes: Level, bytes, Stable, "Tier-1 in use, all users of the budget together";
    tier1_size_bytes: Level, bytes, Stable, "The Tier-1 budget";
    tier1_warm_ratios: Fraction, ratios, Stable, "The part of Tier-1 whose pages are there already";
    spill_used_bytes: Level, bytes, Stable, "The spill in use; 0 without one";
    spill_size_bytes: Level, bytes, Stable, "The spill's budget; 0 without one";
    lag_versions: Level, count, Stable, "Complete versions that are not committed yet";
    lag_bytes: Level, bytes, Stable, "Their bytes that are not in Tier-3 yet";
    lag_seconds: Fraction, seconds, Stable, "How long the oldest of them has been complete";
    fuse_requests: CountBy, count, Stable, "Requests from the kernel, by opcode";
    problem: LevelBy, count, Stable, "Problems that status shows, by code; 0 for each that it does not";
    fuse_awake_seconds: Fraction, seconds, Trial, "How long idle processors were kept from sleeping for requests, since the daemon began";
}

mod units {
    #![expect(non_upper_case_globals, reason = "the table's macro looks its words up here")]
    pub(super) const bytes: &str = "bytes";
    pub(super) const seconds: &str = "seconds";
    pub(super) const ratios: &str = "ratios";
    pub(super) const count: &str = "count";
}

mod kinds {
    pub(super) type Count = super::Counter;
    pub(super) type CountBy = super::CounterBy;
    pub(super) type Level = super::Gauge;
    pub(super) type LevelBy = super::GaugeBy;
    pub(super) type Fraction = super::GaugeF64;
    pub(super) type Times = super::Histogram;

    pub(super) mod names {
        #![expect(non_upper_case_globals, reason = "the table's macro looks its words up here")]
        pub(in super::super) const Count: &str = "counter";
        pub(in super::super) const CountBy: &str = "counter";
        pub(in super::super) const Level: &str = "gauge";
        pub(in super::super) const LevelBy: &str = "gauge";
        pub(in super::super) const Fraction: &str = "gauge";
        pub(in super::super) const Times: &str = "histogram";
    }

    pub(super) mod new {
        #![expect(non_snake_case, reason = "the table's macro looks its words up here")]
        use super::super::{Histogram, exponential_buckets};

        pub(in super::super) fn Count() -> super::Count {
            super::Count::default()
        }
        pub(in super::super) fn CountBy() -> super::CountBy {
            super::CountBy::default()
        }
        pub(in super::super) fn Level() -> super::Level {
            super::Level::default()
        }
        pub(in super::super) fn LevelBy() -> super::LevelBy {
            super::LevelBy::default()
        }
        pub(in super::super) fn Fraction() -> super::Fraction {
            super::Fraction::default()
        }
        /// Makes buckets from 1 ms, for a small file, to about 17 minutes, for a large checkpoint on a slow store.
        pub(in super::super) fn Times() -> super::Times {
            Histogram::new(exponential_buckets(0.001, 4.0, 11))
        }
    }
}

/// Returns the field's name without its unit, which the registry adds.
const fn name_of(field: &'static str, unit: &'static str) -> &'static str {
    let (name, unit_bytes) = (field.as_bytes(), unit.as_bytes());
    if name.len() <= unit_bytes.len() + 1 {
        return field;
    }
    let cut = name.len() - unit_bytes.len();
    let mut index = 0;
    while index < unit_bytes.len() {
        if name[cut + index] != unit_bytes[index] {
            return field;
        }
        index += 1;
    }
    field.split_at(cut - 1).0
}

fn register(registry: &mut Registry, row: &Row, metric: impl Metric) {
    let unit = match row.unit {
        units::bytes => Unit::Bytes,
        units::seconds => Unit::Seconds,
        units::ratios => Unit::Ratios,
        units::count => return registry.register(row.name, row.help, metric),
        unit => unreachable!("{unit} is not one of the table's units"),
    };
    registry.register_with_unit(row.name, row.help, unit, metric);
}

impl Metrics {
    /// Returns the text for Prometheus (OpenMetrics), with its final `# EOF`.
    #[must_use]
    pub fn encode(&self) -> String {
        let mut text = String::new();
        encode(&mut text, &self.registry).expect("writing to a string cannot fail");
        text
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").field("rows", &TABLE.len()).finish_non_exhaustive()
    }
}

/// Raises a counter to a total that is counted elsewhere, such as the mount's requests. If the total is lower, because
/// it was counted from zero again, the counter stays. Each counter may have only one caller at a time.
pub fn raise_to(counter: &Counter, total: u64) {
    let have = counter.get();
    if total > have {
        counter.inc_by(total - have);
    }
}

#[cfg(test)]
#[path = "metrics_test.rs"]
mod tests;
