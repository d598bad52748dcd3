//! `ckptctl placement`: who keeps whose copies, and what the loss of some nodes would cost.

use crate::context::{Context, Failure};
use crate::table::{self, Tone};
use crate::text;
use std::io::{self, Write};
use tidemark_api::PlacementRequest;
use tidemark_protocol::report::{ExitCode, Placement, PlacementRow, SurvivalRow};

/// Show who keeps whose copies, and which losses they survive
///
/// A loss is fatal when it takes what is not in Tier-3 yet. Exits 3 on a node that is alone.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<ExitCode, Failure> {
        context.print(&context.client.get(PlacementRequest).await?, print)?;
        Ok(ExitCode::Done)
    }
}

fn print(placement: &Placement, out: &mut dyn Write) -> io::Result<()> {
    let (scheme, label) = (text::clean(&placement.scheme), text::clean(&placement.label));
    let where_to = if placement.within { "inside one" } else { "apart by" };
    let (epoch, number) = (placement.epoch, placement.number);
    writeln!(out, " {scheme}, partners {where_to} {label}  (epoch {epoch}, placement {number})")?;
    writeln!(out)?;
    table::write(&nodes(&placement.nodes), out)?;
    writeln!(out)?;
    table::write(&survival(&placement.survival), out)?;
    for warning in &placement.warnings {
        writeln!(out, "\nwarning: {}", text::clean(warning))?;
    }
    match placement.more_warnings {
        0 => Ok(()),
        more => writeln!(out, "\nwarning: {more} more of the kind; `-o json` counts them"),
    }
}

fn nodes(rows: &[PlacementRow]) -> comfy_table::Table {
    let mut table = table::new(["NODE", "DOMAIN", "COPIES AT", "DOMAIN", "KEEPS COPIES OF"]);
    for row in rows {
        let optional = |text: &Option<String>| table::text(text.as_deref().unwrap_or("-"));
        let partner = match &row.partner {
            Some(partner) => table::text(partner),
            None => table::word("nobody", Tone::Bad),
        };
        table.add_row([
            table::text(&row.node),
            optional(&row.domain),
            partner,
            optional(&row.partner_domain),
            optional(&row.keeps),
        ]);
    }
    table
}

fn survival(rows: &[SurvivalRow]) -> comfy_table::Table {
    let mut table = table::new(["LOST AT ONCE", "WAYS", "FATAL", "SURVIVED", "WORST", "LOSES DATA OF"]);
    for row in rows {
        let plural = if row.lost == 1 { "" } else { "s" };
        let tone = if row.fatal == 0 { Tone::Good } else { Tone::Doubtful };
        let loses = match row.worst_loses {
            0 => "-".to_owned(),
            1 => "1 node".to_owned(),
            many => format!("{many} nodes"),
        };
        table.add_row([
            table::text(&format!("{} {}{plural}", row.lost, row.of)),
            table::number(row.combinations),
            table::number(row.fatal),
            table::word(&survived(row), tone),
            table::text(&if row.worst.is_empty() { "-".to_owned() } else { row.worst.join(", ") }),
            table::text(&loses),
        ]);
    }
    table
}

/// In percent, never rounded to all or to nothing.
fn survived(row: &SurvivalRow) -> String {
    if row.combinations == 0 {
        return "-".to_owned();
    }
    let harmless = row.combinations.saturating_sub(row.fatal);
    let tenths = u128::from(harmless) * 1000 / u128::from(row.combinations);
    let tenths = if harmless > 0 { tenths.max(1) } else { tenths };
    format!("{}.{} %", tenths / 10, tenths % 10)
}
