//! Several hosts in network namespaces, real daemons and real ranks on them: what is lost with a host, and what is not?
//!
//! | file | owns |
//! |---|---|
//! | `net` | the network itself: does each fault of the harness happen, and does it end? |
//! | `tree` | one tree: names and bytes of one node on the others, and after its loss |
//! | `twin` | random calls on any node, daemons killed or not: are all nodes together one directory? |
//! | `site` | several nodes of one cluster, for the others |
//! | `failover` | the coordinator is lost, stopped or cut off, and another node takes its role |
//! | `ending` | a node is told to end while another becomes the coordinator |
//! | `fixed` | a coordinator that has no lease begins again: the members that it waits for |
//! | `silent` | the coordinator says nothing, and no node takes its role: what goes on |
//! | `copies` | copies in other nodes' memory that are bad |
//! | `links` | what is seen of a save on its way, and changed in it, and what strangers cost |
//! | `tier3` | how often Tier-3 is read |
//! | `members` | which members are cut off or gone, and what any node shows people |
//! | `nodes` | one daemon a host: where it listens, and that nothing of a lost one is left |
//! | `guarded` | an etcd with TLS, client certificates and users: who gets in, and that the cluster lives through it |
//! | `catalog` | the catalog in a real etcd: written once, by one coordinator, and read whole |
//! | `lease` | the lease in a real etcd: one holder at a time, whoever dies or is stopped |
//! | `job` | a training job with a rank on each host, and what it said |

mod catalog;
mod copies;
mod ending;
mod failover;
mod fixed;
mod guarded;
mod job;
mod lease;
mod links;
mod members;
mod net;
mod nodes;
mod silent;
mod site;
mod tier3;
mod tree;
mod twin;
