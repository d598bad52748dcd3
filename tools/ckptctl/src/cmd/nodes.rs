//! `ckptctl nodes`: the machines of this cluster.

use crate::context::{Context, Failure};
use crate::table::{self, Tone};
use crate::text;
use std::io::{self, Write};
use tidemark_api::NodesRequest;
use tidemark_protocol::report::{ExitCode, Node, NodeState};

/// List the nodes of the cluster, how they stand, and who keeps their copies
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<ExitCode, Failure> {
        context.print(&context.client.get(NodesRequest).await?, print)?;
        Ok(ExitCode::Done)
    }
}

fn print(nodes: &Vec<Node>, out: &mut dyn Write) -> io::Result<()> {
    let mut table = table::new([
        "",
        "NODE",
        "STANDING",
        "STATE",
        "ROLE",
        "LISTEN",
        "COPIES AT",
        "LABELS",
        "TIER1 USED",
        "TIER1 SIZE",
        "EPOCH",
        "VERSION",
    ]);
    for node in nodes {
        let labels: Vec<String> = node.labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
        table.add_row([
            table::text(if node.this { "*" } else { "" }),
            table::text(&node.name),
            standing(&node.standing),
            table::word(node.state.word(), tone(node.state)),
            table::text(if node.coordinator { "coordinator" } else { "-" }),
            table::text(&node.listen),
            table::text(node.partner.as_deref().unwrap_or("-")),
            table::text(&if labels.is_empty() { "-".to_owned() } else { labels.join(",") }),
            table::bytes(node.tier1_used_bytes),
            table::bytes(node.tier1_size_bytes),
            table::number(node.epoch),
            table::text(&node.version),
        ]);
    }
    table::write(&table, out)?;
    let now_ms = text::now_ms();
    for node in nodes {
        let Some(why) = &node.why else { continue };
        let ago = node.since_ms.map(|since_ms| format!("  ({} ago)", text::age(since_ms, now_ms)));
        writeln!(out, "\n {}{}", text::clean(why), ago.unwrap_or_default())?;
    }
    Ok(())
}

fn tone(state: NodeState) -> Tone {
    match state {
        NodeState::Serving => Tone::Good,
        NodeState::Starting | NodeState::Draining | NodeState::Unknown => Tone::Doubtful,
        NodeState::Degraded | NodeState::Stopped => Tone::Bad,
    }
}

fn standing(word: &str) -> comfy_table::Cell {
    match word {
        "alive" => table::word(word, Tone::Good),
        "gone" => table::word(word, Tone::Bad),
        // From an older daemon.
        "" => table::text("-"),
        other => table::word(other, Tone::Doubtful),
    }
}
