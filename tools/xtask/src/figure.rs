//! A figure: a bench's `RESULT` line, and its record in `benches/results`.
//!
//! Owns: the fields and how their numbers are shown. Does not own: pages and files (`results`).

use serde_json::{Value, json};

/// A figure with its raw samples and its baseline.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Figure {
    pub(crate) question: String,
    pub(crate) name: String,
    pub(crate) unit: String,
    pub(crate) value: f64,
    /// In the order in which they were taken; empty where the figure was counted or computed.
    pub(crate) samples: Vec<f64>,
    pub(crate) baseline: Option<f64>,
    pub(crate) baseline_samples: Vec<f64>,
    /// Description of the baseline, in plain words.
    pub(crate) against: Option<String>,
    /// Value over baseline.
    pub(crate) ratio: Option<f64>,
    pub(crate) rounds: u64,
    /// Bytes of the files that were moved; 0 if the bench moves none.
    pub(crate) size_bytes: u64,
    /// True when the figure means nothing.
    pub(crate) smoke: bool,
}

impl Figure {
    /// Reads the JSON of a `RESULT` line; an error says what is wrong with the line.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let json: Value =
            serde_json::from_str(text).map_err(|error| format!("is no JSON ({error}): {text}"))?;
        Self::from_json(&json)
    }

    /// Reads what [`Figure::json`] made; an error says what is wrong with it.
    pub(crate) fn from_json(json: &Value) -> Result<Self, String> {
        let lacking = |what: &str| format!("has no {what}: {json}");
        let text = |key: &str| json[key].as_str().map(str::to_owned);
        Ok(Self {
            question: text("question").ok_or_else(|| lacking("question"))?,
            name: text("name").ok_or_else(|| lacking("name"))?,
            unit: text("unit").ok_or_else(|| lacking("unit"))?,
            value: json["value"].as_f64().ok_or_else(|| lacking("value"))?,
            samples: numbers(&json["samples"]),
            baseline: json["baseline"].as_f64(),
            baseline_samples: numbers(&json["baseline_samples"]),
            against: text("against"),
            ratio: json["ratio"].as_f64(),
            rounds: json["rounds"].as_u64().ok_or_else(|| lacking("rounds"))?,
            size_bytes: json["size_bytes"].as_u64().ok_or_else(|| lacking("size_bytes"))?,
            smoke: json["smoke"].as_bool().unwrap_or(false),
        })
    }

    /// Returns the figure as a `RESULT` line has it.
    pub(crate) fn json(&self) -> Value {
        let listed = |samples: &[f64]| if samples.is_empty() { Value::Null } else { samples.into() };
        json!({
            "question": self.question,
            "name": self.name,
            "unit": self.unit,
            "value": self.value,
            "samples": listed(&self.samples),
            "baseline": self.baseline,
            "baseline_samples": listed(&self.baseline_samples),
            "against": self.against,
            "ratio": self.ratio,
            "rounds": self.rounds,
            "size_bytes": self.size_bytes,
            "smoke": self.smoke,
        })
    }
}

/// Shows a number with three digits: more, a figure that was taken on one machine cannot say.
pub(crate) fn round(value: f64) -> String {
    let magnitude = value.abs();
    if magnitude >= 100.0 {
        format!("{value:.0}")
    } else if magnitude >= 10.0 {
        format!("{value:.1}")
    } else if magnitude >= 1.0 || magnitude == 0.0 {
        format!("{value:.2}")
    } else if magnitude >= 0.1 {
        format!("{value:.3}")
    } else {
        format!("{value:.4}")
    }
}

/// Shows a size in the largest unit that it is a whole number of.
pub(crate) fn size(bytes: u64) -> String {
    match bytes {
        whole if whole > 0 && whole.is_multiple_of(1 << 30) => format!("{} GiB", whole >> 30),
        whole if whole > 0 && whole.is_multiple_of(1 << 20) => format!("{} MiB", whole >> 20),
        other => format!("{other} bytes"),
    }
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().into_iter().flatten().filter_map(Value::as_f64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = r#"{"question":"How fast?","name":"write","unit":"GB/s","value":7.825,"samples":[8.0,7.65],
        "baseline":3.1,"baseline_samples":[3.0,3.2],"against":"/dev/shm","ratio":2.524,"rounds":2,
        "size_bytes":4294967296,"smoke":false}"#;

    #[test]
    fn a_line_is_read_and_kept_as_it_was() {
        let figure = Figure::parse(LINE).unwrap();
        assert_eq!((figure.value, figure.samples.as_slice()), (7.825, &[8.0, 7.65][..]));
        assert_eq!(figure.against.as_deref(), Some("/dev/shm"));
        assert_eq!(figure.json(), serde_json::from_str::<Value>(LINE).unwrap());
    }

    #[test]
    fn a_figure_may_have_no_baseline_and_no_samples() {
        let text = r#"{"question":"?","name":"peak","unit":"MiB","value":29,"rounds":2,"size_bytes":0}"#;
        let figure = Figure::parse(text).unwrap();
        assert_eq!((figure.baseline, figure.ratio, figure.samples.len()), (None, None, 0));
        assert_eq!(Figure::from_json(&figure.json()).unwrap(), figure);
    }

    #[test]
    fn a_figure_without_a_value_is_refused() {
        assert!(Figure::parse(&LINE.replace("value", "valeu")).unwrap_err().contains("has no value"));
        assert!(Figure::parse("7 GB/s").unwrap_err().contains("is no JSON"));
    }

    #[test]
    fn three_digits_are_shown() {
        let shown = [340_000.4, 12.34, 7.825, 0.0, 0.6612, 0.0021, -1.5].map(round);
        assert_eq!(shown, ["340000", "12.3", "7.83", "0.00", "0.661", "0.0021", "-1.50"]);
        assert_eq!([4 << 30, 256 << 20, 1000].map(size), ["4 GiB", "256 MiB", "1000 bytes"]);
    }
}
